"""Recipe -> environment. Apart from the rest, and without torch: the processes that grade start in a moment."""

from __future__ import annotations

from midflight.config import Recipe
from midflight.launch.importing import Joint
from midflight.protocols import Environment, GradedTask

ENVIRONMENTS: Joint[Environment | GradedTask] = Joint(
    "task.type",
    {"chain_sums": "midflight.envs.chain_sums:ChainSums", "running_sums": "midflight.envs.running_sums:RunningSums"},
    GradedTask,
    Environment,
)


def build_environment(recipe: Recipe) -> Environment | GradedTask:
    """Raises: RecipeError if the class cannot be found, does not take the recipe's options or cannot be made."""
    task = recipe.task
    return ENVIRONMENTS.try_to_make(task.type, {"seed": recipe.run.seed}, task.options)
