"""`[schedule]` of a recipe or a scenario -> schedule. Does not import torch, so that simulations start at once."""

from __future__ import annotations

from midflight.config.schedules import PipelineConfig, ScheduleConfig, pipeline_capacity
from midflight.launch.importing import Joint, options_of
from midflight.protocols import Schedule

SCHEDULES: Joint[Schedule] = Joint(
    "schedule.type",
    {
        "pipeline": "midflight.schedules.pipeline:PipelineSchedule",
        "conventional": "midflight.schedules.conventional:ConventionalSchedule",
        "april": "midflight.schedules.april:AprilSchedule",
        "bounded": "midflight.schedules.bounded:BoundedSchedule",
        "one_step_off": "midflight.schedules.bounded:one_step_off",
    },
    Schedule,
)


def build_schedule(config: ScheduleConfig, *, batch_size: int, group_size: int, seed: int) -> Schedule:
    """Return the schedule; `batch_size` and `group_size` are in rollouts.

    Raises: RecipeError if the user's own class cannot be used.
    """
    offered = {"batch_size": batch_size, "group_size": group_size, "seed": seed}
    options = options_of(config)
    if isinstance(config, PipelineConfig):
        options["queue_capacity"] = pipeline_capacity(config, batch_size)
    return SCHEDULES.try_to_make(config.type, offered, options)
