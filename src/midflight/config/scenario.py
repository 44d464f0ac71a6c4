"""Scenarios: hardware that is not there, and what runs on it, for `midflight simulate` and `midflight plan`.

The file is TOML with overrides like a recipe's, and has a recipe's `[schedule]`. Times are in `simulation.time_unit`,
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
        None, ge=1, description="I: engines that generate while the other devices train; not of schedules in turns"
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
                f"batch_size = {self.batch_size} is not a multiple of group_size = {self.group_size}: groups are"
                " trained whole"
            )
        return self


class UniformLengthsConfig(Section):
    """1 to `max` tokens, all as likely."""

    type: Literal["uniform"] = "uniform"
    max: int = Field(8192, ge=1, description="L: longest response, tokens")


class ConstantLengthsConfig(Section):
    type: Literal["constant"] = "constant"
    length: int = Field(ge=1, description="of every response, tokens")


class LogNormalLengthsConfig(Section):
    """A long tail, cut off: min(ceil(median * exp(group_sigma * z_group + sigma * z)), max)."""

    type: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0, description="of responses that are not cut off, tokens")
    sigma: float = Field(ge=0, description="of the logarithm, between rollouts of a group")
    group_sigma: float = Field(0.0, ge=0, description="of the logarithm, between groups")
    max: int = Field(ge=1, description="longer ones are cut off here, tokens")

    @pydantic.model_validator(mode="after")
    def check_sigmas(self) -> LogNormalLengthsConfig:
        if self.sigma == self.group_sigma == 0:
            raise ValueError("sigma and group_sigma are both 0; type = 'constant' would work")
        return self


class TwoPointLengthsConfig(Section):
    type: Literal["two_point"] = "two_point"
    short: int = Field(ge=1, description="most responses, tokens")
    long: int = Field(ge=1, description="the others, tokens")
    long_share: float = Field(ge=0, le=1, description="how many are long")


class ListedLengthsConfig(Section):
    type: Literal["list"] = "list"
    file: Path | None = Field(
        None, description="JSON object with lengths, counts and has_gradient, for lists too long for a scenario"
    )
    lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, description="of responses, tokens")
    counts: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(
        None, description="how often each was seen; default: once"
    )
    order: Literal["random", "cycled"] = Field(
        "random", description="draw from the list, or go through it again and again"
    )
    has_gradient: tuple[bool, ...] | None = Field(
        None,
        description="with order = 'cycled', of each group of batch.group_size lengths: whether training on it takes"
        " time; default: as training.without_gradient_fraction has it",
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
        """Everything that is not in the file."""
        in_file = ("lengths", "counts", "has_gradient") if self.file else ()
        return {key: value for key, value in dump(self).items() if key not in in_file}

    @pydantic.model_validator(mode="after")
    def check_counts(self) -> ListedLengthsConfig:
        for key, order in (("has_gradient", "cycled"), ("counts", "random")):
            if getattr(self, key) is not None and self.order != order:
                raise ValueError(f"{key} is of order = {order!r}, and it is {self.order!r}")
        if self.counts is not None and len(self.counts) != len(self.lengths):
            raise ValueError(f"there are {len(self.counts)} counts for {len(self.lengths)} lengths")
        if self.counts is not None and not sum(self.counts):
            raise ValueError("counts are all 0")
        return self


class RunLengthsConfig(Section):
    type: Literal["run"] = "run"
    directory: Path = Field(description="a run directory: all responses that run generated")


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
    """The U(h) of an H100 that the PipelineRL paper's figures imply, in tokens per flash."""

    type: Literal["paper"] = "paper"


class TableDecodeConfig(Section):
    """U(h) of one engine, as `midflight calibrate` measures it."""

    type: Literal["table"] = "table"
    gpus_per_engine: int = Field(1, ge=1, description="devices of one engine (tensor parallelism)")
    sizes: tuple[int, ...] = Field(description="numbers of sequences in flight, going up")
    rates: tuple[float, ...] = Field(description="U at each: tokens per unit of time, never going down")
    pad_to: int = Field(1, ge=1, description="a step costs as much as one with the next multiple of so many sequences")
    beyond: Literal["error", "hold"] = Field("error", description="past the last size: refuse, or go on with its rate")


class AffineDecodeConfig(Section):
    """A step of h sequences that hold c response tokens takes base + per_sequence * h + per_token * c."""

    type: Literal["affine"] = "affine"
    gpus_per_engine: int = Field(1, ge=1, description="devices of one engine (tensor parallelism)")
    base: float = Field(ge=0, description="time of a step, whatever it holds: reading the weights, overhead")
    per_sequence: float = Field(0.0, ge=0, description="time for each sequence: arithmetic, sampling")
    per_token: float = Field(0.0, ge=0, description="time for each response token that is held: reading keys, values")


DecodeConfig = Annotated[PaperDecodeConfig | TableDecodeConfig | AffineDecodeConfig, ByType()]


class TrainingConfig(Section):
    time_per_token: float = Field(4.919, ge=0, description="tau: of one device, for one token; n devices take 1/n")
    time_per_step: float = Field(0.0, ge=0, description="of an optimizer step besides, however many devices")
    without_gradient_fraction: float = Field(
        0.0, ge=0, le=1, description="share of groups whose advantages are all 0: training on them takes no time"
    )

    @property
    def mean_time_per_token(self) -> float:
        """Of all tokens, with and without a gradient."""
        return self.time_per_token * (1 - self.without_gradient_fraction)


class DelaysConfig(Section):
    """What keeps weights and batches on their way, and engines from generating."""

    transfer: float = Field(0.0, ge=0, description="time from the end of an optimizer step until engines may adopt")
    preprocess: float = Field(0.0, ge=0, description="time from a batch being complete until it can be trained on")
    update_pause: float = Field(0.0, ge=0, description="time that an engine stands still while it adopts new weights")
    handover_pause: float = Field(0.0, ge=0, description="time that engines stand still while a batch is made up")


class FailuresConfig(Section):
    """Engines that die; their rollouts go on elsewhere with the tokens they have."""

    mean_time_between: float | None = Field(None, gt=0, description="of one engine, exponential; default: none fails")
    repair_time: float = Field(0.0, ge=0, description="until it is back")


class SimulationConfig(Section):
    time_unit: str = Field("flash", min_length=1, description="what times are counted in, for people")
    num_steps: int = Field(1000, ge=1, description="optimizer steps")
    num_warm_up_steps: int = Field(200, ge=0, description="of those, how many first ones are left out of the figures")
    seed: int = Field(0, ge=0, description="lengths, filtering and failures follow from it")

    @pydantic.model_validator(mode="after")
    def check_steps(self) -> SimulationConfig:
        if self.num_warm_up_steps >= self.num_steps:
            raise ValueError(
                f"num_warm_up_steps = {self.num_warm_up_steps} leaves none of num_steps = {self.num_steps}"
            )
        return self


class Scenario(Section):
    cluster: ClusterConfig = ClusterConfig()
    batch: ScenarioBatchConfig = ScenarioBatchConfig()
    lengths: LengthsConfig = UniformLengthsConfig()
    schedule: ScheduleConfig = PipelineConfig()
    decode: DecodeConfig = PaperDecodeConfig()
    training: TrainingConfig = TrainingConfig()
    # Of schedules that take turns, where that differs: on a CPU, engines then have all cores.
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
                f"lengths.has_gradient has {len(listed.has_gradient)} groups, and {len(listed.lengths)} lengths in"
                f" groups of batch.group_size = {self.batch.group_size} are not as many"
            )
        return self

    @pydantic.model_validator(mode="after")
    def check_schedule(self) -> Scenario:
        check_queue(self.schedule, self.batch.batch_size)
        return self
