"""`[schedule]`: one section per `type`."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from midflight.config.section import ByType, OwnSection, Section


class PipelineConfig(Section):
    """Keep H rollouts in flight, always; adopt new weights after every optimizer step."""

    type: Literal["pipeline"] = "pipeline"
    num_in_flight: int = Field(64, ge=1, description="rollouts being generated at any time, per engine")
    queue_capacity: int | None = Field(
        None,
        ge=1,
        description="finished rollouts that wait, the batch in training not counted; default: a batch, the least that"
        " works, or with max_lag all that it allows",
    )
    when_full: Literal["block", "drop_oldest"] = Field(
        "block", description="past queue_capacity: do not refill finished slots, or drop the groups that finished first"
    )
    max_lag: int | None = Field(None, ge=0, description="hard bound on token lag, optimizer steps; default: none")


class ConventionalConfig(Section):
    """Generate for G optimizer steps, then train G times, in turns."""

    type: Literal["conventional"] = "conventional"
    steps_per_rl_step: int = Field(1, ge=1, description="G: optimizer steps per RL step")
    num_in_flight: int | None = Field(None, ge=1, description="rollouts at a time; default: all of the RL step")


class AprilConfig(Section):
    """Start more groups than a batch needs, train on the first to finish, go on with the others later."""

    type: Literal["april"] = "april"
    over_sampling: float = Field(2.0, ge=1, description="groups held at a time, in batches; 1 waits for all of them")
    max_versions: int | None = Field(
        None, ge=1, description="weight versions in one rollout: an iteration waits for those that have so many"
    )
    num_in_flight: int | None = Field(None, ge=1, description="rollouts at a time; default: all that are held")
    refill: Literal["at_once", "over_sampled"] = Field(
        "at_once",
        description="for groups that dynamic sampling leaves out: others one by one; or over_sampling batches more, as"
        " APRIL's released code does, once less than a batch is left of those held",
    )

    @pydantic.model_validator(mode="after")
    def check_refill(self) -> AprilConfig:
        if self.refill == "over_sampled" and self.num_in_flight is not None:
            raise ValueError(
                f"refill = 'over_sampled' starts all at once, and num_in_flight = {self.num_in_flight} does not;"
                " 'at_once' would work"
            )
        return self


class BoundedConfig(Section):
    """Generation runs ahead of training by a bounded number of optimizer steps."""

    type: Literal["bounded"] = "bounded"
    max_lag: int = Field(1, ge=0, description="hard bound on token lag, optimizer steps")
    updates: Literal["in_flight", "boundary"] = Field(
        "in_flight", description="adopt new weights between two tokens, or between two batches only"
    )
    num_in_flight: int | None = Field(None, ge=1, description="rollouts at a time; default: all that the bound allows")


class OneStepOffConfig(Section):
    """Generate the next batch while this one is trained on: bounded, with max_lag = 1 and updates = "boundary"."""

    type: Literal["one_step_off"] = "one_step_off"
    num_in_flight: int | None = Field(None, ge=1, description="rollouts at a time; default: a batch")


class OwnScheduleConfig(OwnSection):
    """A class of your own with the members of midflight.protocols.Schedule."""


ScheduleConfig = Annotated[
    PipelineConfig | ConventionalConfig | AprilConfig | BoundedConfig | OneStepOffConfig | OwnScheduleConfig, ByType()
]


def pipeline_capacity(schedule: PipelineConfig, batch_size: int) -> int:
    """Finished rollouts that may wait: `queue_capacity`, or all that `max_lag` allows, or a batch."""
    # In start order, what is finished may have to wait for what is not: max_lag alone says how much.
    return schedule.queue_capacity or batch_size * (1 + (schedule.max_lag or 0))


def check_queue(schedule: ScheduleConfig, batch_size: int) -> None:
    """Whether a batch fits into the queue, if there is one. Raises: ValueError."""
    if isinstance(schedule, PipelineConfig) and (capacity := pipeline_capacity(schedule, batch_size)) < batch_size:
        raise ValueError(
            f"schedule.queue_capacity = {capacity} is less than batch.batch_size = {batch_size}: the batch could"
            f" never fill up; {batch_size} or more would work"
        )
