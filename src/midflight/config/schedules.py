"""`[schedule]`: one section per `type`."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from midflight.config.section import ByType, OwnSection, Section


class PipelineConfig(Section):
    """Keep H rollouts in flight at all times; adopt new weights after every optimizer step."""

    type: Literal["pipeline"] = "pipeline"
    num_in_flight: int = Field(64, ge=1, description="H: rollouts in flight at any time, per engine")
    queue_capacity: int | None = Field(
        None,
        ge=1,
        description="finished rollouts that may wait, without the batch in training; default: one batch, the minimum,"
        " or with max_lag as many as it allows",
    )
    when_full: Literal["block", "drop_oldest"] = Field(
        "block", description="if the queue is full: do not refill slots, or drop the groups that finished first"
    )
    max_lag: int | None = Field(None, ge=0, description="hard bound on token lag, optimizer steps; default: none")


class ConventionalConfig(Section):
    """Generate for G optimizer steps, then train G times, in turns."""

    type: Literal["conventional"] = "conventional"
    steps_per_rl_step: int = Field(1, ge=1, description="G: optimizer steps per RL step")
    num_in_flight: int | None = Field(None, ge=1, description="rollouts in flight; default: all of the RL step")


class AprilConfig(Section):
    """Start more groups than a batch needs, train on the first to finish, and resume the others later."""

    type: Literal["april"] = "april"
    over_sampling: float = Field(2.0, ge=1, description="groups held at a time, in batches; 1 waits for all of them")
    max_versions: int | None = Field(
        None, ge=1, description="limit of weight versions in one rollout; an iteration waits for rollouts at the limit"
    )
    num_in_flight: int | None = Field(None, ge=1, description="rollouts in flight; default: all rollouts held")
    refill: Literal["at_once", "over_sampled"] = Field(
        "at_once",
        description="replacement of groups that dynamic sampling leaves out: one by one, at once; or over_sampling"
        " batches together, when less than a batch is left of the groups held, as in APRIL's released code",
    )

    @pydantic.model_validator(mode="after")
    def check_refill(self) -> AprilConfig:
        if self.refill == "over_sampled" and self.num_in_flight is not None:
            raise ValueError(
                f"refill = 'over_sampled' starts all rollouts together, which num_in_flight = {self.num_in_flight}"
                " prevents; refill = 'at_once', or no num_in_flight, would work"
            )
        return self


class BoundedConfig(Section):
    """Generation runs ahead of training by a bounded number of optimizer steps."""

    type: Literal["bounded"] = "bounded"
    max_lag: int = Field(1, ge=0, description="hard bound on token lag, optimizer steps")
    updates: Literal["in_flight", "boundary"] = Field(
        "in_flight", description="adopt new weights between two tokens, or only between two batches"
    )
    num_in_flight: int | None = Field(
        None, ge=1, description="rollouts in flight; default: all rollouts that the bound allows"
    )


class OneStepOffConfig(Section):
    """Generate the next batch during training: the same as bounded with max_lag = 1 and updates = "boundary"."""

    type: Literal["one_step_off"] = "one_step_off"
    num_in_flight: int | None = Field(None, ge=1, description="rollouts in flight; default: one batch")


class OwnScheduleConfig(OwnSection):
    """Your own class with the members of midflight.protocols.Schedule."""


ScheduleConfig = Annotated[
    PipelineConfig | ConventionalConfig | AprilConfig | BoundedConfig | OneStepOffConfig | OwnScheduleConfig, ByType()
]


def pipeline_capacity(schedule: PipelineConfig, batch_size: int) -> int:
    """Number of finished rollouts that may wait: `queue_capacity`, or as many as `max_lag` allows, or one batch."""
    # With max_lag, batches are in start order: finished rollouts wait for unfinished ones, which max_lag alone bounds.
    return schedule.queue_capacity or batch_size * (1 + (schedule.max_lag or 0))


def check_queue(schedule: ScheduleConfig, batch_size: int) -> None:
    """Check that a batch fits into the queue, if the schedule has one. Raises: ValueError."""
    if isinstance(schedule, PipelineConfig) and (capacity := pipeline_capacity(schedule, batch_size)) < batch_size:
        raise ValueError(
            f"schedule.queue_capacity = {capacity} is less than batch.batch_size = {batch_size}: the batch could"
            f" never fill up; {batch_size} or more would work"
        )
