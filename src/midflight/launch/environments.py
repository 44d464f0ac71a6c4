"""Recipe -> environment. A separate module that does not import torch, so that grading processes start fast."""

from __future__ import annotations

from midflight.config import Recipe
from midflight.config.tasks import BuiltInSource, OwnSource
from midflight.launch.importing import Joint, keys_of
from midflight.protocols import Environment, GradedTask

ENVIRONMENTS: Joint[Environment | GradedTask] = Joint(
    "task.type",
    {"chain_sums": "midflight.envs.chain_sums:ChainSums", "running_sums": "midflight.envs.running_sums:RunningSums"},
    GradedTask,
    Environment,
)


def build_environment(recipe: Recipe) -> Environment | GradedTask:
    """Return the environment. Raises: RecipeError if its class cannot be imported, or fails with these options."""
    task = recipe.task
    options = task.options if isinstance(task, BuiltInSource | OwnSource) else keys_of(task)
    return ENVIRONMENTS.try_to_make(task.type, {"seed": recipe.run.seed}, options)
