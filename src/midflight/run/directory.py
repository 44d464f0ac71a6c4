"""Run directories: made for a new run, opened for one that goes on."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from midflight.config import Recipe, dump_toml, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import RecipeError, RunDirectoryError

# What may differ when a run goes on; the rest decides which problems and batches there are.
_RESUMABLE = {"trainer", "metrics", "supervisor", "engine", "eval", "preprocess.threads"}
_FIXED = {"trainer.lora_rank", "trainer.lora_alpha", "trainer.lora_targets"}  # what checkpoints hold depends on them


def create_run(recipe: Recipe) -> RunDirectory:
    """A new run directory with the resolved recipe in it.

    Raises: RunDirectoryError if the directory already holds something.
    """
    path = recipe.run.directory or Path("runs") / f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = path.resolve()
    run = RunDirectory(path)
    if run.config.exists():
        raise RunDirectoryError(
            f"{path} already holds a run; `midflight train {path} --resume` goes on with it, another run.directory"
            " starts a new one"
        )
    create_directory(path)
    try:
        for directory in (run.checkpoints, run.batches.parent, run.path / "logs"):
            directory.mkdir(parents=True, exist_ok=True)
        run.identity_file.write_text(f"{uuid.uuid4().hex}\n")
        run.config.write_text(dump_toml(recipe.model_copy(update={"run": _at(recipe, path)})))
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {path}: {error.strerror}") from error
    return run


def create_directory(path: Path) -> None:
    """Create a directory, unless it is there and empty.

    Raises: RunDirectoryError if something is there, or it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        empty = not any(path.iterdir())
    except FileExistsError:
        empty = False
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {path}: {error.strerror}") from error
    if not empty:
        raise RunDirectoryError(f"{path} exists and is not an empty directory")


def open_run(path: Path, overrides: list[str]) -> tuple[RunDirectory, Recipe]:
    """An existing run and its recipe.

    Raises: RunDirectoryError if it is no run; RecipeError for an override that would make it a different run.
    """
    run = RunDirectory(path.resolve())
    if not run.config.is_file():
        raise RunDirectoryError(f"{path} holds no run: there is no {run.config.name} in it")
    for override in overrides:
        key = override.partition("=")[0].strip()
        section = key.partition(".")[0]
        if key in _FIXED:
            raise RecipeError(f"override {override}: a run goes on with the {key} it began with")
        if not {section, key} & _RESUMABLE:
            allowed = ", ".join(sorted(_RESUMABLE))
            raise RecipeError(
                f"override {override}: a run goes on with the {section} it began with; only {allowed} may change"
            )
    return run, load_recipe(run.config, overrides)


def check_output(path: Path | None) -> None:
    """Whether a file can be written there, before the work that it is of. Raises: RunDirectoryError."""
    if path is not None and not path.parent.is_dir():
        raise RunDirectoryError(f"cannot write {path}: there is no directory {path.parent}")
    if path is not None and path.is_dir():
        raise RunDirectoryError(f"cannot write {path}: it is a directory")


def write_whole(path: Path, text: str) -> None:
    """Replace the file at once, so that a full disk leaves the old one.

    Raises: RunDirectoryError if it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror}") from error


def _at(recipe: Recipe, path: Path) -> object:
    return recipe.run.model_copy(update={"directory": path})
