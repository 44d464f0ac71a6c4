"""The plain sections: what is run, on what, how much of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from midflight.config.section import ByType, OwnSection, Section
from midflight.types import TEMPERATURES


class RunConfig(Section):
    name: str = Field("run", min_length=1, pattern=r"^[\w.-]+$", description="run directories are named after it")
    seed: int = Field(0, ge=0, description="problems, sampling and packing follow from it")
    directory: Path | None = Field(None, description="where the run is written; default runs/NAME-DATE-TIME")


class ModelConfig(Section):
    path: Path = Field(description="Hugging Face model directory (config.json, *.safetensors, tokenizer.json)")


class TaskConfig(Section):
    type: str = Field("chain_sums", description="a built-in environment, or package.module:Class")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    num_graders: int = Field(1, ge=1, description="processes that grade responses")
    grading_timeout_s: float = Field(
        10.0, gt=0, description="a verifier that takes longer is killed and its rollout failed, seconds"
    )


class SamplingConfig(Section):
    max_tokens: int = Field(160, ge=1, description="longest response, all turns together, tokens")
    temperature: float = Field(
        1.0,
        ge=TEMPERATURES[0],
        le=TEMPERATURES[1],
        description="of the sampling distribution; the trainer applies the same",
    )


Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]


class EngineOptions(Section):
    """What every engine understands: those of servers, too, which read the same recipe."""

    device: Device = Field("cpu", description="cpu, cuda or cuda:N")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: all cores if colocated, else half")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="what is computed in; auto: the weights' own, but float32 on a CPU that only emulates bfloat16",
    )
    max_prompt_tokens: int = Field(
        64, ge=1, description="longest prompt, with all that an environment adds in later turns, tokens"
    )
    max_batched_tokens: int = Field(512, ge=16, description="of one step: decodes and pieces of prefills, tokens")
    kv_cache_mib: int | None = Field(
        None, ge=1, description="memory of the KV cache, MiB; default: all sequences in flight at their longest"
    )
    prefix_caching: bool = Field(True, description="use the keys and values of known prefixes again, within a version")
    recompute_kv: bool = Field(
        False, description="after an update, compute keys and values in flight again with the new weights"
    )
    max_update_pause_s: float = Field(
        0.02, gt=0, description="new weights are copied between steps, at most about this long each time, seconds"
    )


class EmbeddedEngineConfig(EngineOptions):
    """Generate in the rollout process."""

    type: Literal["embedded"] = "embedded"


class HttpEngineConfig(EngineOptions):
    """Generate on servers that `midflight serve --join` adds to the run."""

    type: Literal["http"] = "http"
    update_timeout_s: float = Field(
        60.0, gt=0, description="a server that takes longer over new weights leaves, and may join again, seconds"
    )
    join_timeout_s: float = Field(
        600.0, gt=0, description="the run ends if there is no server for so long while one is needed, seconds"
    )


class OwnEngineConfig(OwnSection, EngineOptions):
    """A class of your own with the members of midflight.protocols.Generator."""


EngineConfig = Annotated[EmbeddedEngineConfig | HttpEngineConfig | OwnEngineConfig, ByType(keeps=True)]


class BatchConfig(Section):
    batch_size: int = Field(32, ge=1, description="rollouts per optimizer step; a multiple of group_size")
    group_size: int = Field(8, ge=1, description="rollouts per problem")
    max_tokens: int = Field(4096, ge=1, description="tokens per microbatch")
    dynamic_sampling: bool = Field(
        False, description="leave out groups whose rewards are all equal, and generate others instead (DAPO)"
    )
    max_filtered_in_a_row: int = Field(
        1024, ge=1, description="with dynamic_sampling: the run ends after so many such groups in a row"
    )
    mask_older_than: int | None = Field(
        None, ge=0, description="tokens of a greater lag carry no loss, optimizer steps; default: all tokens do"
    )
    mask_truncated: bool = Field(
        False,
        description="responses that were cut off at sampling.max_tokens carry no loss (DAPO's overlong filtering)",
    )


class SqliteStreamsConfig(Section):
    """Groups and batches travel from process to process through files in the run directory."""

    type: Literal["sqlite"] = "sqlite"


class RedisStreamsConfig(Section):
    """Groups and batches travel through keys in a Redis."""

    type: Literal["redis"] = "redis"
    url: str | None = Field(
        None,
        pattern=r"^(rediss?|unix)://",
        description="of the Redis, without a password; default: $MIDFLIGHT_REDIS_URL, or redis://127.0.0.1:6379/0",
    )

    @pydantic.model_validator(mode="after")
    def check_url(self) -> RedisStreamsConfig:
        if self.url and "@" in self.url:
            raise ValueError("url holds a password, and would be written to the run; $MIDFLIGHT_REDIS_URL may hold it")
        return self


class OwnStreamsConfig(OwnSection):
    """A class of your own with the members of midflight.protocols.Stream."""


StreamsConfig = Annotated[SqliteStreamsConfig | RedisStreamsConfig | OwnStreamsConfig, ByType()]


class SharedMemoryWeightsConfig(Section):
    """New weights travel through the memory of one machine."""

    type: Literal["shared_memory"] = "shared_memory"


class FileWeightsConfig(Section):
    """New weights travel through a directory that the trainer and whatever generates both see."""

    type: Literal["files"] = "files"
    directory: Path | None = Field(None, description="where they are written; default: weights/ in the run directory")


class OwnWeightsConfig(OwnSection):
    """A class of your own with the members of midflight.protocols.WeightTransport."""


WeightsConfig = Annotated[SharedMemoryWeightsConfig | FileWeightsConfig | OwnWeightsConfig, ByType()]


class PreprocessConfig(Section):
    """Advantages, packing and the log-probabilities of the reference, between generation and training."""

    process: Literal["rollout", "own"] = Field(
        "rollout", description="where it runs: in the process that generates, or in one of its own beside it"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of a process of its own; default: 1")


class TrainerOptions(Section):
    """What every trainer understands."""

    device: Device = Field("cpu", description="cpu, cuda (one device per rank) or cuda:N; may be the engine's")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="what is computed in, and what engines get; trained parameters and AdamW's moments stay float32",
    )
    activation_checkpointing: bool = Field(
        False, description="compute each decoder layer again in the backward pass instead of keeping what it computed"
    )
    lora_rank: int | None = Field(None, ge=1, description="train LoRA adapters of this rank; default: all parameters")
    lora_alpha: float | None = Field(
        None, gt=0, description="adapters count lora_alpha / lora_rank times; default: twice"
    )
    lora_targets: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="names of the linear layers that get one, as q_proj; default: all but the output head",
    )
    max_steps: int = Field(500, ge=1, description="optimizer steps of the run")
    max_seconds: float | None = Field(None, gt=0, description="stop earlier after this much training, seconds")
    learning_rate: float = Field(2e-4, gt=0, description="of AdamW, at its highest")
    learning_rate_shape: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="how it goes on after the warm-up: falling over max_steps to final_learning_rate, or not",
    )
    warmup_steps: int = Field(0, ge=0, description="it rises linearly over so many optimizer steps")
    final_learning_rate: float = Field(0.0, ge=0, description="after max_steps, unless it is constant")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="decay of AdamW's two moments")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW, decoupled")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this global norm")
    checkpoint_every: int = Field(200, ge=1, description="optimizer steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="how many of the newest checkpoints stay")
    max_nonfinite_steps: int = Field(5, ge=1, description="stop after this many skipped steps in a row")
    threads: int | None = Field(
        None, ge=1, description="CPU threads of a rank; default: all cores if colocated, else half, shared by all ranks"
    )

    @pydantic.model_validator(mode="after")
    def check_lora(self) -> TrainerOptions:
        if self.lora_rank is None and (self.lora_alpha is not None or self.lora_targets is not None):
            key = "lora_alpha" if self.lora_alpha is not None else "lora_targets"
            raise ValueError(f"{key} is of LoRA adapters, and lora_rank is not set; lora_rank = 16 would work")
        return self


class SingleTrainerConfig(TrainerOptions):
    """One process."""

    type: Literal["single"] = "single"

    @property
    def num_ranks(self) -> int:
        return 1


class RankOptions(TrainerOptions):
    """What trainers of several processes understand."""

    num_ranks: int = Field(1, ge=1, description="processes that train; batch.batch_size is a multiple of it")

    @pydantic.model_validator(mode="after")
    def check_device(self) -> RankOptions:
        if self.num_ranks > 1 and ":" in self.device:
            raise ValueError(f"device = {self.device!r} is one, and num_ranks = {self.num_ranks}; 'cuda' would work")
        return self


class FsdpTrainerConfig(RankOptions):
    """Processes that share parameters, gradients and optimizer states: PyTorch's FSDP2."""

    type: Literal["fsdp"] = "fsdp"


class DeepSpeedTrainerConfig(RankOptions):
    """Processes that share optimizer states and more: DeepSpeed's ZeRO."""

    type: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[2, 3] = Field(2, description="share gradients and optimizer states (2), parameters too (3)")

    @pydantic.model_validator(mode="after")
    def check_adapters(self) -> DeepSpeedTrainerConfig:
        if self.lora_rank is not None:
            raise ValueError("type = 'deepspeed' trains all parameters, without lora_rank; 'fsdp' would work")
        return self


TrainerConfig = Annotated[SingleTrainerConfig | FsdpTrainerConfig | DeepSpeedTrainerConfig, ByType(keeps=True)]


class SinkConfig(OwnSection):
    """A class of your own with the members of midflight.protocols.MetricsSink."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def with_options(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value


class MetricsConfig(Section):
    sinks: tuple[SinkConfig, ...] = Field(
        (),
        description='where metrics go besides metrics.jsonl: ["package.module:Class", {type = "package.module:Class",'
        " options = {...}}]",
    )


class SupervisorConfig(Section):
    """What watches the processes of a run, and starts again what dies or hangs."""

    max_restarts: int = Field(
        3, ge=0, description="of one process in a row, without an optimizer step in between; then the run ends"
    )
    backoff_s: float = Field(
        0.5, ge=0, description="wait before a process is started again; doubles each time in a row, seconds"
    )
    heartbeat_timeout_s: float = Field(
        600.0,
        gt=0,
        description="a process that does nothing for so long is killed and started again; more than the longest"
        " optimizer step, checkpoint or start takes, seconds",
    )


class EvalConfig(Section):
    num_problems: int = Field(512, ge=0, description="held-out problems before and after the run; 0: none")
    num_in_flight: int = Field(256, ge=1, description="problems at a time")
    hard_from: int = Field(5, ge=0, description="accuracy is also reported for problems of this difficulty and above")


class ServeConfig(Section):
    """`midflight serve`: the model over HTTP."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; other than loopback needs a token")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0: any that is free")
    admin_token: pydantic.SecretStr | None = Field(
        None,
        exclude=True,  # a run directory is no place for it
        description="what weight updates, abort, pause and resume must carry; default: $MIDFLIGHT_ADMIN_TOKEN, or none",
    )
    model_name: str | None = Field(
        None, min_length=1, description="what clients call the model; default: its directory"
    )
    num_in_flight: int = Field(64, ge=1, description="sequences being generated at a time; more requests wait")
    max_samples: int = Field(128, ge=1, description="most samples (n) of one request")
    max_body_bytes: int = Field(4 << 20, ge=1, description="largest request body, bytes")
