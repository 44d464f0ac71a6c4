"""Recipe -> the streams of a run: files in its directory, or keys in a Redis."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import RecipeError, StreamError
from midflight.protocols import Stream
from midflight.streams.redis import RedisStream
from midflight.streams.sqlite import SqliteStream
from midflight.types import ChosenBatch, TrainingBatch

Record = TypeVar("Record")

# Where a password belongs, so that no recipe and no run directory holds one.
URL_VARIABLE = "MIDFLIGHT_REDIS_URL"
# Batches in either stream. When it is full, finished groups wait in the rollout process.
_CAPACITY = 4096
_CHECK_PATIENCE_S = 2.0


def open_batches(run: RunDirectory, recipe: Recipe) -> Stream[TrainingBatch]:
    """The stream that the trainer reads."""
    return _open(run, recipe, run.batches, TrainingBatch)


def open_groups(run: RunDirectory, recipe: Recipe) -> Stream[ChosenBatch]:
    """The stream that a preprocessing process reads."""
    return _open(run, recipe, run.groups, ChosenBatch)


def check_streams(recipe: Recipe) -> None:
    """Raises: RecipeError if the recipe's Redis cannot be used; MissingExtraError without the package for it."""
    if recipe.streams.type == "redis":
        try:
            name = f"midflight:check:{os.getpid()}"
            stream = RedisStream(_redis_url(recipe), name, TrainingBatch, 1, _CHECK_PATIENCE_S)
            with contextlib.closing(stream):
                stream.remove()
        except StreamError as error:
            raise RecipeError(f"streams: {error}") from error


def _open(run: RunDirectory, recipe: Recipe, path: Path, record_type: type[Record]) -> Stream[Record]:
    if recipe.streams.type == "redis":
        name = f"midflight:{run.identity}:{path.stem}"
        return RedisStream(_redis_url(recipe), name, record_type, _CAPACITY)
    return SqliteStream(path, record_type, _CAPACITY)


def _redis_url(recipe: Recipe) -> str:
    return recipe.streams.url or os.environ.get(URL_VARIABLE) or "redis://127.0.0.1:6379/0"
