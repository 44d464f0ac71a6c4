"""Checks of recipe files that need neither models nor datasets, such as the recipes that ship."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from midflight.config import Recipe, load_recipe
from midflight.config.sections import DeepSpeedTrainerConfig, RedisStreamsConfig
from midflight.config.tasks import DatasetSource, MixtureSource, ReasoningGymSource
from midflight.errors import MidflightError, MissingExtraError, ModelError, RecipeError
from midflight.launch.build import check_recipe, check_structure
from midflight.launch.rewards import build_rewards
from midflight.models.loading import check_model_directory
from midflight.trainer.deepspeed import is_installed


def check_recipes(paths: Iterable[Path]) -> Iterator[str]:
    """Yield one line per recipe: checked, or checked except for the parts that are missing on this machine.

    Raises: RecipeError that begins with the path of the first wrong recipe.
    """
    for path in paths:
        try:
            recipe = load_recipe(path, _stand_ins(path))
            check_structure(recipe)
            missing = missing_for_checks(recipe)
            if not missing:
                check_recipe(recipe)
        except MidflightError as error:
            raise RecipeError(f"{path}: {error}") from error
        yield f"{path}: ok" + (f"; not checked: {'; '.join(missing)}" if missing else "")


def missing_for_checks(recipe: Recipe) -> list[str]:
    """Return what `check_recipe` needs and this machine lacks, or what it could reach only over a network.

    Raises: RecipeError if a reward is wrong.
    """
    missing = []
    devices = {"trainer.device": recipe.trainer.device, "engine.device": recipe.engine.device}
    needs_cuda = [f"{key} = {device!r}" for key, device in devices.items() if device != "cpu"]
    if needs_cuda and not torch.cuda.is_available():
        missing.append(f"{' and '.join(needs_cuda)} (no CUDA device)")
    if isinstance(recipe.trainer, DeepSpeedTrainerConfig) and not is_installed():
        missing.append("trainer.type = 'deepspeed' (not installed)")
    for key, directory in {"model.path": recipe.model.path, "reference.path": recipe.reference.path}.items():
        try:
            check_model_directory(directory or recipe.model.path, key)
        except ModelError as error:
            missing += [str(error)] if directory else []
    sources = _sources(recipe)
    try:
        for source in sources:
            build_rewards(source.rewards)
    except MissingExtraError as error:
        missing.append(str(error))
    missing += [f"dataset {name}" for name in sorted(_absent(sources))]
    if isinstance(recipe.streams, RedisStreamsConfig):
        missing.append("the Redis server of [streams]")
    if recipe.reference.url:
        missing.append(f"reference.url = {recipe.reference.url}")
    return missing


def _sources(recipe: Recipe) -> list[DatasetSource | ReasoningGymSource]:
    """Sources of problems with rewards of their own: of the task, or of its mixture, and of the evaluation sets."""
    task = recipe.task
    tasks = [source.task for source in task.sources] if isinstance(task, MixtureSource) else [task]
    every = [*tasks, *(each.task for each in recipe.eval.sets)]
    return [source for source in every if isinstance(source, DatasetSource | ReasoningGymSource)]


def _absent(sources: Iterable[DatasetSource | ReasoningGymSource]) -> set[str]:
    """Data sets of the hub, which may need a download, and paths that do not exist."""
    datasets = [source for source in sources if isinstance(source, DatasetSource)]
    paths = [path for source in datasets for path in (source.path, source.held_out_path) if path and not path.exists()]
    return {source.hub_id for source in datasets if source.hub_id} | {str(path) for path in paths}


def _stand_ins(path: Path) -> list[str]:
    """Overrides for a recipe that evaluates any model, and therefore names none."""
    try:
        names_model = "model" in tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return []  # loading the recipe reports the error
    return [] if names_model else ["model.path=MODEL"]


def recipes_below(directory: Path) -> list[Path]:
    """Return the TOML files of a directory, at any depth. Raises: RecipeError if there is none."""
    paths = sorted(directory.rglob("*.toml"))
    if not paths:
        raise RecipeError(f"{directory} has no TOML files")
    return paths
