"""The plain sections: run, model, sampling, engine, batch, streams, weights, trainer and so on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from midflight.config.section import ByType, OwnSection, Section
from midflight.types import TEMPERATURES


class RunConfig(Section):
    name: str = Field("run", min_length=1, pattern=r"^[\w.-]+$", description="name of the run and its directory")
    seed: int = Field(0, ge=0, description="seed of problems, sampling and packing")
    directory: Path | None = Field(None, description="run directory; default: runs/NAME-DATE-TIME")
    recipe_directory: Path | None = Field(
        None,
        description="directory of your own modules, and of relative paths in their options; default: the recipe's own",
    )


class ModelConfig(Section):
    path: Path = Field(description="Hugging Face model directory (config.json, *.safetensors, tokenizer.json)")


class SamplingConfig(Section):
    max_tokens: int = Field(160, ge=1, description="largest length of a response, all turns together, tokens")
    temperature: float = Field(
        1.0,
        ge=TEMPERATURES[0],
        le=TEMPERATURES[1],
        description="temperature of the sampling distribution; the trainer applies the same temperature",
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the likeliest tokens whose probabilities add up to this; 1: from all"
    )
    top_k: int = Field(0, ge=0, description="sample from this many likeliest tokens; 0: from all")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="sample from tokens at least this many times as likely as the likeliest one"
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), max_length=16, description="texts that end a response, besides the model's end tokens"
    )

    @property
    def is_truncated(self) -> bool:
        """True if some tokens are never sampled, although the policy gives them a probability."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]


class EngineOptions(Section):
    """Options of every engine, including the engines of servers, which read the same recipe."""

    device: Device = Field("cpu", description="device: cpu, cuda or cuda:N")
    threads: int | None = Field(
        None, ge=1, description="number of CPU threads; default: all cores if colocated, else half"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="dtype of computation; auto: the dtype of the weights, or float32 on a CPU that emulates bfloat16",
    )
    max_prompt_tokens: int = Field(
        64, ge=1, description="largest length of a prompt, including the environment's text of later turns, tokens"
    )
    max_batched_tokens: int = Field(
        512, ge=16, description="largest batch of one step: decodes and chunks of prefills, tokens"
    )
    kv_cache_mib: int | None = Field(
        None, ge=1, description="memory of the KV cache, MiB; default: enough for all sequences at full length"
    )
    prefix_caching: bool = Field(
        True, description="reuse keys and values of known prefixes that have the same weight version"
    )
    recompute_kv: bool = Field(
        False, description="after a weight update, recompute the keys and values in flight with the new weights"
    )
    weight_sets: Literal[1, 2] = Field(
        2,
        description="copies of the weights in memory; 2: new weights arrive during decoding, 1: decoding pauses for"
        " them, and after a failed update the engine waits for the next version",
    )


class EmbeddedEngineConfig(EngineOptions):
    """Generate in the rollout process."""

    type: Literal["embedded"] = "embedded"


class HttpEngineConfig(EngineOptions):
    """Generate on servers that `midflight serve --join` adds to the run."""

    type: Literal["http"] = "http"
    join_timeout_s: float = Field(
        600.0, gt=0, description="longest wait for a server when the run has none; then the run ends, seconds"
    )


class OwnEngineConfig(OwnSection, EngineOptions):
    """Your own class with the members of midflight.protocols.LocalEngine."""


EngineConfig = Annotated[EmbeddedEngineConfig | HttpEngineConfig | OwnEngineConfig, ByType(keeps=True)]


class BatchConfig(Section):
    batch_size: int = Field(32, ge=1, description="rollouts per optimizer step; a multiple of group_size")
    group_size: int = Field(8, ge=1, description="rollouts per problem")
    max_tokens: int = Field(4096, ge=1, description="largest size of a microbatch, tokens")
    dynamic_sampling: bool = Field(
        False, description="leave out groups whose rewards are all equal, and generate new groups instead (DAPO)"
    )
    max_filtered_in_a_row: int = Field(
        1024, ge=1, description="with dynamic_sampling: the run ends after this many left-out groups in a row"
    )
    mask_older_than: int | None = Field(
        None, ge=0, description="tokens with a larger lag carry no loss, optimizer steps; default: all tokens do"
    )
    mask_truncated: bool = Field(
        False,
        description="responses cut off at sampling.max_tokens carry no loss (DAPO's overlong filtering)",
    )


class SqliteStreamsConfig(Section):
    """Groups and batches travel between processes through files in the run directory."""

    type: Literal["sqlite"] = "sqlite"


class RedisStreamsConfig(Section):
    """Groups and batches travel between processes through keys of a Redis server."""

    type: Literal["redis"] = "redis"
    url: str | None = Field(
        None,
        pattern=r"^(rediss?|unix)://",
        description="URL of the Redis server, without a password; default: $MIDFLIGHT_REDIS_URL, or"
        " redis://127.0.0.1:6379/0",
    )

    @pydantic.model_validator(mode="after")
    def check_url(self) -> RedisStreamsConfig:
        if self.url and "@" in self.url:
            raise ValueError(
                "url contains a password, and recipes are copied to run directories; set $MIDFLIGHT_REDIS_URL instead"
            )
        return self


class OwnStreamsConfig(OwnSection):
    """Your own class with the members of midflight.protocols.Stream."""


StreamsConfig = Annotated[SqliteStreamsConfig | RedisStreamsConfig | OwnStreamsConfig, ByType()]


class SharedMemoryWeightsConfig(Section):
    """New weights travel through shared memory to an engine in the rollout process; the default with such an engine."""

    type: Literal["shared_memory"] = "shared_memory"


class FileWeightsConfig(Section):
    """New weights travel through a directory that the trainer and the engines share."""

    type: Literal["files"] = "files"
    directory: Path | None = Field(None, description="shared directory; default: weights/ in the run directory")


class ProcessGroupWeightsConfig(Section):
    """The trainer broadcasts new weights to the servers of engine.type = "http"; the default with these servers."""

    type: Literal["process_group"] = "process_group"
    backend: Literal["auto", "tcp", "nccl"] = Field(
        "auto",
        description="tcp: from server to server; nccl: a broadcast; auto: nccl if trainer.device and engine.device are"
        " CUDA devices",
    )
    address: str | None = Field(
        None, min_length=1, description="address of the trainer as the servers reach it; default: by the route to them"
    )
    bucket_mib: int = Field(32, ge=1, description="size of one message of the broadcast, MiB")
    timeout_s: float = Field(
        60.0,
        gt=0,
        description="longest wait for one server, to join the broadcast or for a bucket; then the others go on without"
        " it, and it may come back, seconds",
    )
    snapshot: bool | None = Field(
        None,
        description="send from a copy of the weights, so that training waits for the copy only; default: true with"
        " trainer.type = 'single', else false",
    )


class OwnWeightsConfig(OwnSection):
    """Your own class with the members of midflight.protocols.WeightTransport."""


WeightsConfig = Annotated[
    SharedMemoryWeightsConfig | FileWeightsConfig | ProcessGroupWeightsConfig | OwnWeightsConfig, ByType()
]


class PreprocessConfig(Section):
    """Preprocessing between generation and training: advantages, packing and log-probabilities of the reference."""

    num_workers: int | None = Field(
        None,
        ge=0,
        le=64,
        description="number of processes that preprocess; 0: the rollout process does, and generation stands still"
        " meanwhile; default: 1 with a reference model, else 0",
    )
    threads: int | None = Field(None, ge=1, description="number of CPU threads of each process; default: 1")
    device: Device | None = Field(
        None,
        description="device of the reference model: cpu, cuda (worker N on device N, modulo their number) or cuda:N;"
        " default: engine.device",
    )


class TrainerOptions(Section):
    """Options of every trainer."""

    device: Device = Field(
        "cpu", description="device: cpu, cuda (one device per rank) or cuda:N; may be the engine's device"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="dtype of computation and of published weights; parameters and AdamW's moments stay float32",
    )
    activation_checkpointing: bool = Field(
        False, description="save memory: recompute each decoder layer in the backward pass"
    )
    lora_rank: int | None = Field(None, ge=1, description="train LoRA adapters of this rank; default: all parameters")
    lora_alpha: float | None = Field(
        None, gt=0, description="adapters are scaled by lora_alpha / lora_rank; default: twice lora_rank"
    )
    lora_targets: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="names of the linear layers with adapters, such as q_proj; default: all except the output head",
    )
    max_steps: int = Field(500, ge=1, description="number of optimizer steps of the run")
    max_seconds: float | None = Field(None, gt=0, description="stop earlier, after this much training time, seconds")
    learning_rate: float = Field(2e-4, gt=0, description="largest learning rate of AdamW")
    learning_rate_shape: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="learning rate after the warm-up: constant, or falling to final_learning_rate at max_steps",
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of a linear warm-up of the learning rate")
    final_learning_rate: float = Field(
        0.0, ge=0, description="learning rate at max_steps, unless learning_rate_shape is constant"
    )
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="decay rates of AdamW's two moments")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this global norm")
    checkpoint_every: int = Field(200, ge=1, description="optimizer steps between checkpoints")
    checkpoint_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="dtype of the model in checkpoints; auto: bfloat16 if model.path is bfloat16, else float32;"
        " a run resumes from float32 parameters in either case",
    )
    keep_checkpoints: int = Field(2, ge=1, description="number of newest checkpoints to keep")
    keep_best: bool = Field(False, description="also keep the checkpoint with the highest accuracy; needs eval.every")
    max_nonfinite_steps: int = Field(
        5, ge=1, description="the run ends after this many steps in a row without a finite loss or gradient"
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="number of CPU threads of a rank; default: all cores if colocated, else half, shared by all ranks",
    )

    @pydantic.model_validator(mode="after")
    def check_lora(self) -> TrainerOptions:
        if self.lora_rank is None and (self.lora_alpha is not None or self.lora_targets is not None):
            key = "lora_alpha" if self.lora_alpha is not None else "lora_targets"
            raise ValueError(f"{key} needs LoRA adapters, but lora_rank is not set; lora_rank = 16 would work")
        return self


class SingleTrainerConfig(TrainerOptions):
    """One training process."""

    type: Literal["single"] = "single"

    @property
    def num_ranks(self) -> int:
        return 1


class RankOptions(TrainerOptions):
    """Options of trainers with several processes."""

    num_ranks: int = Field(1, ge=1, description="number of training processes; batch.batch_size is a multiple of it")

    @pydantic.model_validator(mode="after")
    def check_device(self) -> RankOptions:
        if self.num_ranks > 1 and ":" in self.device:
            raise ValueError(
                f"device = {self.device!r} is a single device, but num_ranks = {self.num_ranks}; 'cuda' would work"
            )
        return self


class FsdpTrainerConfig(RankOptions):
    """PyTorch's FSDP2: the ranks shard parameters, gradients and optimizer states."""

    type: Literal["fsdp"] = "fsdp"


class DeepSpeedTrainerConfig(RankOptions):
    """DeepSpeed's ZeRO: the ranks shard optimizer states, gradients and, in stage 3, parameters."""

    type: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[2, 3] = Field(2, description="shard gradients and optimizer states (2), parameters too (3)")

    @pydantic.model_validator(mode="after")
    def check_adapters(self) -> DeepSpeedTrainerConfig:
        if self.lora_rank is not None:
            raise ValueError("type = 'deepspeed' does not support lora_rank; type = 'fsdp' would work")
        return self


TrainerConfig = Annotated[SingleTrainerConfig | FsdpTrainerConfig | DeepSpeedTrainerConfig, ByType(keeps=True)]


class SinkConfig(OwnSection):
    """Your own class with the members of midflight.protocols.MetricsSink."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def with_options(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value


class MetricsConfig(Section):
    sinks: tuple[SinkConfig, ...] = Field(
        (),
        description='destinations of metrics besides metrics.jsonl: ["package.module:Class",'
        ' {type = "package.module:Class", options = {...}}]',
    )


class SupervisorConfig(Section):
    """The supervisor watches the processes of a run and restarts a process that dies or hangs."""

    max_restarts: int = Field(
        3, ge=0, description="largest number of restarts of one process without an optimizer step in between"
    )
    backoff_s: float = Field(
        0.5, ge=0, description="wait before a restart, doubled with each restart in a row, seconds"
    )
    heartbeat_timeout_s: float = Field(
        600.0,
        gt=0,
        description="restart a process without a heartbeat for this long; must be more than the longest optimizer"
        " step, checkpoint or start, seconds",
    )
