"""Recipe -> environment. A separate module that does not import torch, so that grading processes start fast."""

from __future__ import annotations

from typing import Any

from midflight.config import Recipe
from midflight.config.section import Section
from midflight.config.tasks import (
    BuiltInSource,
    DatasetSource,
    MixtureSource,
    OwnSource,
    ReasoningGymSource,
    TaskOptions,
)
from midflight.envs.datasets.task import DatasetTask
from midflight.envs.mixture import Share, build_mixture
from midflight.envs.reasoning_gym import ReasoningGymTask
from midflight.envs.routing import Router
from midflight.errors import RecipeError
from midflight.launch.importing import Joint, keys_of
from midflight.launch.prompt_limit import RecipePromptLimit
from midflight.launch.rewards import build_rewards
from midflight.launch.users_modules import use_directory_of
from midflight.protocols import Environment, GradedTask

ENVIRONMENTS: Joint[Environment | GradedTask] = Joint(
    "task.type",
    {"chain_sums": "midflight.envs.chain_sums:ChainSums", "running_sums": "midflight.envs.running_sums:RunningSums"},
    GradedTask,
    Environment,
)


AnySource = BuiltInSource | OwnSource | DatasetSource | ReasoningGymSource | MixtureSource


def build_environment(recipe: Recipe) -> Environment | GradedTask:
    """Return the environment. Raises: RecipeError if its class cannot be imported, or fails with these options."""
    return build_source(recipe, recipe.task, "task")


def build_source(recipe: Recipe, source: AnySource, key: str) -> Environment | GradedTask:
    """Return the environment of a task, of one source of a mixture, or of an evaluation set.

    `key`: the recipe's key of the source, for messages.
    Raises: RecipeError as `build_environment`.
    """
    use_directory_of(recipe)
    seed = recipe.run.seed
    if isinstance(source, MixtureSource):
        shares = []
        for index, item in enumerate(source.sources):
            environment = build_source(recipe, item.task, f"{key}.sources.{index}.task")
            shares.append(Share(item.name or str(index), item.weight, environment))
        return build_mixture(shares, seed, key)
    if isinstance(source, DatasetSource):
        if not source.rewards:
            raise RecipeError(f'{key}.rewards: a dataset needs at least one reward, such as ["math"]')
        limit = RecipePromptLimit(recipe) if source.drop_long_prompts else None
        return DatasetTask(source, rewards=build_rewards(source.rewards), seed=seed, limit=limit, key=key)
    if isinstance(source, ReasoningGymSource):
        return ReasoningGymTask(source, rewards=build_rewards(source.rewards), seed=seed, key=key)
    return ENVIRONMENTS.try_to_make(source.type, {"seed": seed}, _options_of(source))


def _options_of(source: Section) -> dict[str, Any]:
    """Return the keyword arguments of a source's class: its options, or its own keys."""
    if isinstance(source, BuiltInSource | OwnSource):
        return source.options
    return {key: value for key, value in keys_of(source).items() if key not in TaskOptions.model_fields}


def build_all_environments(recipe: Recipe) -> Environment | GradedTask:
    """Return the task's environment, with the environments of all evaluation sets behind it. Raises: RecipeError."""
    task = build_environment(recipe)
    if not recipe.eval.sets:
        return task
    return Router(task, build_set_environments(recipe))


def build_set_environments(recipe: Recipe) -> dict[str, Environment | GradedTask]:
    """Return the environment of each evaluation set by name. Raises: RecipeError."""
    return {
        item.name: build_source(recipe, item.task, f"eval.sets.{index}.task")
        for index, item in enumerate(recipe.eval.sets)
    }
