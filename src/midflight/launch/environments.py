"""Recipe -> environment. Apart from the rest, and without torch: the processes that grade start in a moment."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from midflight.actor.failures import reason_of
from midflight.config import Recipe
from midflight.errors import MidflightError, RecipeError
from midflight.launch.importing import import_object
from midflight.protocols import Environment, GradedTask

ENVIRONMENTS = {
    "chain_sums": "midflight.envs.chain_sums:ChainSums",
    "running_sums": "midflight.envs.running_sums:RunningSums",
}


def build_environment(recipe: Recipe) -> Environment | GradedTask:
    """Raises: RecipeError if the class cannot be found, does not take the recipe's options or cannot be made."""
    path = ENVIRONMENTS.get(recipe.task.type, recipe.task.type)
    if ":" not in path:
        known = ", ".join(sorted(ENVIRONMENTS))
        raise RecipeError(f"task.type: {path!r} is neither a built-in task ({known}) nor package.module:Class")
    environment_class = import_object("task.type", path)
    if not callable(environment_class):
        raise RecipeError(f"task.type: {path!r} is of type {type(environment_class).__name__}, not a class")
    with users_code(recipe, "the constructor"):
        environment: Environment | GradedTask = environment_class(**_arguments(recipe, environment_class))
    turns = ("reset", "step") if hasattr(environment, "reset") or hasattr(environment, "step") else ("grade",)
    members = ("problem", "held_out_problems", *turns)
    missing = [name for name in members if not callable(getattr(environment, name, None))]
    if missing:
        raise RecipeError(f"task.type: {path!r} is no environment: it has no {', no '.join(missing)}")
    return environment


@contextlib.contextmanager
def users_code(recipe: Recipe, what: str) -> Iterator[None]:
    """Turn whatever the user's environment raises into a RecipeError with its place in their code."""
    try:
        yield
    except MidflightError:
        raise
    except Exception as error:
        raise RecipeError(f"task.type: {recipe.task.type}, {what}: {reason_of(error)}") from error


def _arguments(recipe: Recipe, environment_class: Callable[..., Any]) -> dict[str, Any]:
    """The recipe's options, and the seed if the constructor takes one.

    Raises: RecipeError if it does not take the options.
    """
    signature = inspect.signature(environment_class)
    takes_seed = "seed" in signature.parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )
    arguments = ({"seed": recipe.run.seed} if takes_seed else {}) | recipe.task.options
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise RecipeError(f"task.options: {recipe.task.type}: {error}") from error
    return arguments
