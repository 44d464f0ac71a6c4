"""The `[schedule]` of a recipe or a scenario -> the schedule. Imports no torch: simulations start at once."""

from __future__ import annotations

from midflight.config.schedules import (
    AprilConfig,
    BoundedConfig,
    ConventionalConfig,
    OneStepOffConfig,
    PipelineConfig,
    ScheduleConfig,
    queue_capacity,
)
from midflight.protocols import Schedule
from midflight.schedules.april import AprilSchedule
from midflight.schedules.bounded import BoundedSchedule
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule


def build_schedule(config: ScheduleConfig, *, batch_size: int, group_size: int, seed: int) -> Schedule:
    """`batch_size` and `group_size` in rollouts."""
    match config:
        case PipelineConfig():
            capacity = queue_capacity(config, batch_size)
            return PipelineSchedule(batch_size, config.num_in_flight, capacity, config.max_lag, config.when_full)
        case ConventionalConfig():
            return ConventionalSchedule(batch_size, config.steps_per_rl_step, config.num_in_flight, seed)
        case AprilConfig():
            return AprilSchedule(
                batch_size, group_size, config.over_sampling, config.max_versions, config.num_in_flight, config.refill
            )
        case BoundedConfig():
            return BoundedSchedule(batch_size, config.max_lag, config.updates, config.num_in_flight)
        case OneStepOffConfig():
            return BoundedSchedule(batch_size, max_lag=1, updates="boundary", num_in_flight=config.num_in_flight)
