"""Scenarios: simulated hardware and its workload, for `midflight simulate` and `midflight plan`.

A scenario is TOML with overrides, like a recipe, and has the same `[schedule]`. Times are in `simulation.time_unit`,
rates in tokens per that unit. The defaults are the case study in appendix A of the PipelineRL paper.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from midflight.config.schedules import PipelineConfig, ScheduleConfig, check_queue
from midflight.config.section import ByType, Section


class ClusterConfig(Section):
    num_gpus: int = Field(128, ge=1, description="N: devices that generate or train")
    num_engines: int | None = Field(
        None,
        ge=1,
        description="I: engines that generate while the other devices train; unused by schedules that take turns",
    )


class ScenarioBatchConfig(Section):
    batch_size: int = Field(128, ge=1, description="B: rollouts per optimizer step; a multiple of group_size")
    group_size: int = Field(1, ge=1, description="rollouts per problem")
    filter_rate: float = Field(
        0.0, ge=0, lt=1, description="share of finished groups that dynamic sampling leaves out (DAPO)"
    )

    @pydantic.model_validator(mode="after")
    def check_groups(self) -> ScenarioBatchConfig:
        if self.batch_size % self.group_size:
            raise ValueError(
                f"batch_size = {self.batch_size} is not a multiple of group_size = {self.group_size}, and groups are"
                " trained whole"
            )
        return self


class UniformLengthsConfig(Section):
    """1 to `max` tokens, all lengths equally likely."""

    type: Literal["uniform"] = "uniform"
    max: int = Field(8192, ge=1, description="L: longest response, tokens")


class ConstantLengthsConfig(Section):
    type: Literal["constant"] = "constant"
    length: int = Field(ge=1, description="length of every response, tokens")


class LogNormalLengthsConfig(Section):
    """A long tail, cut off: min(ceil(median * exp(group_sigma * z_group + sigma * z)), max)."""

    type: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0, description="median length without the cut-off, tokens")
    sigma: float = Field(ge=0, description="standard deviation of the logarithm between rollouts of a group")
    group_sigma: float = Field(0.0, ge=0, description="standard deviation of the logarithm between groups")
    max: int = Field(ge=1, description="longer responses are cut off here, tokens")

    @pydantic.model_validator(mode="after")
    def check_sigmas(self) -> LogNormalLengthsConfig:
        if self.sigma == self.group_sigma == 0:
            raise ValueError("sigma and group_sigma are both 0; type = 'constant' would work")
        return self


class TwoPointLengthsConfig(Section):
    type: Literal["two_point"] = "two_point"
    short: int = Field(ge=1, description="length of short responses, tokens")
    long: int = Field(ge=1, description="length of long responses, tokens")
    long_share: float = Field(ge=0, le=1, description="share of long responses")


class ListedLengthsConfig(Section):
    type: Literal["list"] = "list"
    file: Path | None = Field(
        None, description="JSON object with lengths, counts and has_gradient, for lists too long for a scenario"
    )
    lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, description="response lengths, tokens")
    counts: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(
        None, description="number of responses of each length; default: one"
    )
    order: Literal["random", "cycled"] = Field("random", description="draw from the list, or repeat it in order")
    has_gradient: tuple[bool, ...] | None = Field(
        None,
        description="with order = 'cycled', for each group of batch.group_size lengths: true if training on it takes"
        " time; default: drawn with training.without_gradient_fraction",
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def read_file(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("file") is None or "lengths" in values:
            return values
        try:
            return {**json.loads(Path(values["file"]).read_text()), **values}
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"cannot read the file {values['file']}: {error}") from error

    @pydantic.model_serializer(mode="wrap")
    def without_file(self, dump: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the keys that `file` does not provide."""
        in_file = ("lengths", "counts", "has_gradient") if self.file else ()
        return {key: value for key, value in dump(self).items() if key not in in_file}

    @pydantic.model_validator(mode="after")
    def check_counts(self) -> ListedLengthsConfig:
        for key, order in (("has_gradient", "cycled"), ("counts", "random")):
            if getattr(self, key) is not None and self.order != order:
                raise ValueError(f"{key} needs order = {order!r}, but order = {self.order!r}")
        if self.counts is not None and len(self.counts) != len(self.lengths):
            raise ValueError(f"there are {len(self.counts)} counts for {len(self.lengths)} lengths; list one for each")
        if self.counts is not None and not sum(self.counts):
            raise ValueError("counts are all 0; at least one must be positive")
        return self


class RunLengthsConfig(Section):
    type: Literal["run"] = "run"
    directory: Path = Field(description="run directory: lengths of all responses that this run generated")


LengthsConfig = Annotated[
    UniformLengthsConfig
    | ConstantLengthsConfig
    | LogNormalLengthsConfig
    | TwoPointLengthsConfig
    | ListedLengthsConfig
    | RunLengthsConfig,
    ByType(),
]


class PaperDecodeConfig(Section):
    """U(h) of an H100 as implied by the PipelineRL paper's figures, in tokens per flash."""

    type: Literal["paper"] = "paper"


class TableDecodeConfig(Section):
    """U(h) of one engine, as `midflight calibrate` measures it."""

    type: Literal["table"] = "table"
    gpus_per_engine: int = Field(1, ge=1, description="devices of one engine (tensor parallelism)")
    sizes: tuple[int, ...] = Field(description="numbers of sequences in flight, ascending")
    rates: tuple[float, ...] = Field(description="U at each size: tokens per unit of time, never descending")
    pad_to: int = Field(1, ge=1, description="a step costs as much as if padded to a multiple of this many sequences")
    beyond: Literal["error", "hold"] = Field("error", description="beyond the last size: refuse, or keep its rate")


class AffineDecodeConfig(Section):
    """A step over h sequences with c response tokens takes base + per_sequence * h + per_token * c."""

    type: Literal["affine"] = "affine"
    gpus_per_engine: int = Field(1, ge=1, description="devices of one engine (tensor parallelism)")
    base: float = Field(ge=0, description="constant time of a step: reading the weights, overhead")
    per_sequence: float = Field(0.0, ge=0, description="time per sequence: arithmetic, sampling")
    per_token: float = Field(0.0, ge=0, description="time per response token in the KV cache: reading keys and values")


DecodeConfig = Annotated[PaperDecodeConfig | TableDecodeConfig | AffineDecodeConfig, ByType()]


class TrainingConfig(Section):
    time_per_token: float = Field(4.919, ge=0, description="tau: time of one device for one token; n devices take 1/n")
    time_per_step: float = Field(0.0, ge=0, description="additional time per optimizer step, for any number of devices")
    without_gradient_fraction: float = Field(
        0.0, ge=0, le=1, description="share of groups whose advantages are all 0: training on them takes no time"
    )

    @property
    def mean_time_per_token(self) -> float:
        """Mean over all tokens, with and without a gradient."""
        return self.time_per_token * (1 - self.without_gradient_fraction)


class DelaysConfig(Section):
    """Delays of weights and batches, and pauses of the engines."""

    transfer: float = Field(
        0.0, ge=0, description="time from the end of an optimizer step until engines can adopt its weights"
    )
    preprocess: float = Field(0.0, ge=0, description="time from a complete batch to the start of training on it")
    update_pause: float = Field(0.0, ge=0, description="pause of an engine while it adopts new weights")
    handover_pause: float = Field(0.0, ge=0, description="pause of all engines while a batch is assembled")


class FailuresConfig(Section):
    """Engine failures; rollouts of a failed engine continue on other engines with the tokens they have."""

    mean_time_between: float | None = Field(
        None, gt=0, description="mean time between failures of one engine, exponential; default: no failures"
    )
    repair_time: float = Field(0.0, ge=0, description="time from a failure until the engine is back")


class SimulationConfig(Section):
    time_unit: str = Field("flash", min_length=1, description="name of the time unit in output")
    num_steps: int = Field(1000, ge=1, description="number of optimizer steps")
    num_warm_up_steps: int = Field(200, ge=0, description="number of first optimizer steps left out of the figures")
    seed: int = Field(0, ge=0, description="seed of lengths, filtering and failures")

    @pydantic.model_validator(mode="after")
    def check_steps(self) -> SimulationConfig:
        if self.num_warm_up_steps >= self.num_steps:
            raise ValueError(
                f"num_warm_up_steps = {self.num_warm_up_steps} leaves none of num_steps = {self.num_steps}; raise"
                " num_steps or lower num_warm_up_steps"
            )
        return self


class Scenario(Section):
    cluster: ClusterConfig = ClusterConfig()
    batch: ScenarioBatchConfig = ScenarioBatchConfig()
    lengths: LengthsConfig = UniformLengthsConfig()
    schedule: ScheduleConfig = PipelineConfig()
    decode: DecodeConfig = PaperDecodeConfig()
    training: TrainingConfig = TrainingConfig()
    # For schedules that take turns, if their costs differ: on a CPU, engines then use all cores.
    colocated_decode: DecodeConfig | None = None
    colocated_training: TrainingConfig | None = None
    delays: DelaysConfig = DelaysConfig()
    colocated_delays: DelaysConfig | None = None
    failures: FailuresConfig = FailuresConfig()
    simulation: SimulationConfig = SimulationConfig()

    @pydantic.model_validator(mode="after")
    def check_gradients(self) -> Scenario:
        listed = self.lengths
        if not isinstance(listed, ListedLengthsConfig) or listed.has_gradient is None:
            return self
        if len(listed.has_gradient) * self.batch.group_size != len(listed.lengths):
            raise ValueError(
                f"lengths.has_gradient has {len(listed.has_gradient)} groups, which does not fit {len(listed.lengths)}"
                f" lengths in groups of batch.group_size = {self.batch.group_size}"
            )
        return self

    @pydantic.model_validator(mode="after")
    def check_schedule(self) -> Scenario:
        check_queue(self.schedule, self.batch.batch_size)
        return self
