"""Recipe -> environment. Apart from the rest, and without torch: the processes that grade start in a moment."""

from __future__ import annotations

from midflight.config import Recipe
from midflight.errors import RecipeError
from midflight.launch.importing import import_object
from midflight.protocols import Environment

ENVIRONMENTS = {"chain_sums": "midflight.envs.chain_sums:ChainSums"}


def build_environment(recipe: Recipe) -> Environment:
    """Raises: RecipeError if the class cannot be found or does not take the recipe's options."""
    path = ENVIRONMENTS.get(recipe.task.type, recipe.task.type)
    if ":" not in path:
        known = ", ".join(sorted(ENVIRONMENTS))
        raise RecipeError(f"task.type: {path!r} is neither a built-in task ({known}) nor package.module:Class")
    environment_class = import_object("task.type", path)
    try:
        environment: Environment = environment_class(**{"seed": recipe.run.seed, **recipe.task.options})
    except TypeError as error:
        raise RecipeError(f"task.options: {error}") from error
    return environment
