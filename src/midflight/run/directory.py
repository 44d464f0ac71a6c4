"""Run directories: created for a new run, opened to resume a run."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from midflight.config import Recipe, dump_toml, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import RecipeError, RunDirectoryError

# Sections and keys that may change when a run is resumed. All others determine its problems and batches.
_RESUMABLE = {"trainer", "metrics", "supervisor", "engine", "eval", "weights"}
_RESUMABLE |= {"preprocess.threads", "preprocess.device"}
_FIXED = {"trainer.lora_rank", "trainer.lora_alpha", "trainer.lora_targets"}  # they determine the checkpoints' contents


def create_run(recipe: Recipe) -> RunDirectory:
    """Create a run directory with the resolved recipe in it.

    Raises: RunDirectoryError if the directory exists and is not empty, or cannot be written.
    """
    path = recipe.run.directory or Path("runs") / f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = path.resolve()
    run = RunDirectory(path)
    if run.config.exists():
        raise RunDirectoryError(
            f"{path} already holds a run; resume it with `midflight train {path} --resume`, or start a new run in"
            " another run.directory"
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
    """Create a directory; an empty directory may exist already.

    Raises: RunDirectoryError if the path exists and is not an empty directory, or the directory cannot be created.
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
    """Open an existing run; return it and its recipe with the overrides.

    Raises: RunDirectoryError if the directory holds no run; RecipeError for an override of a key that may not change.
    """
    run = RunDirectory(path.resolve())
    if not run.config.is_file():
        raise RunDirectoryError(f"{path} holds no run: there is no {run.config.name} in it")
    for override in overrides:
        key = override.partition("=")[0].strip()
        section = key.partition(".")[0]
        if key in _FIXED:
            raise RecipeError(f"override {override}: a resumed run keeps its {key}; start a new run to change it")
        if not {section, key} & _RESUMABLE:
            allowed = ", ".join(sorted(_RESUMABLE))
            raise RecipeError(f"override {override}: a resumed run keeps its {section}; only {allowed} may change")
    return run, load_recipe(run.config, overrides)


def check_output(path: Path | None) -> None:
    """Check, before the work starts, that an output file can be created. Raises: RunDirectoryError if not."""
    if path is not None and not path.parent.is_dir():
        raise RunDirectoryError(f"cannot write {path}: there is no directory {path.parent}")
    if path is not None and path.is_dir():
        raise RunDirectoryError(f"cannot write {path}: it is a directory")


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: if the disk is full, the old file stays.

    Raises: RunDirectoryError if the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror}") from error


def _at(recipe: Recipe, path: Path) -> object:
    return recipe.run.model_copy(update={"directory": path})
