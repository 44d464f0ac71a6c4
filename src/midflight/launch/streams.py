"""Recipe -> streams of a run: files in its directory, keys in Redis, or the user's own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, TypeVar

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.config.sections import RedisStreamsConfig
from midflight.errors import RecipeError, StreamError
from midflight.launch.importing import Joint, options_of
from midflight.protocols import Stream
from midflight.types import ChosenBatch, GroupScores, GroupToScore, TrainingBatch

Record = TypeVar("Record")

STREAMS: Joint[Stream[Any]] = Joint(
    "streams.type",
    {"sqlite": "midflight.streams.sqlite:SqliteStream", "redis": "midflight.streams.redis:RedisStream"},
    Stream,
)
# Batches in either stream. If a stream is full, finished groups wait in the rollout process.
_CAPACITY = 4096
# Batches of groups on the way to each preprocessing process. A batch waits for the groups that were sent before it, and
# the schedule may have dropped them: the bound limits this delay.
_BATCHES_AHEAD = 2
_CHECK_PATIENCE_S = 2.0


def open_batches(run: RunDirectory, recipe: Recipe) -> Stream[TrainingBatch]:
    """Open the stream that the trainer reads."""
    return _open(run, recipe, run.batches, TrainingBatch)


def open_groups(run: RunDirectory, recipe: Recipe) -> Stream[ChosenBatch]:
    """Open the stream that a preprocessing process reads."""
    return _open(run, recipe, run.groups, ChosenBatch)


def open_unscored(run: RunDirectory, recipe: Recipe, worker: int) -> Stream[GroupToScore]:
    """Open the stream of finished groups that preprocessing process `worker` scores."""
    return _open(run, recipe, run.unscored(worker), GroupToScore, _num_ahead(recipe))


def open_scores(run: RunDirectory, recipe: Recipe, worker: int) -> Stream[GroupScores]:
    """Open the stream of scores from preprocessing process `worker` to the first one."""
    return _open(run, recipe, run.scores(worker), GroupScores, _num_ahead(recipe))


def scoring_workers(recipe: Recipe) -> range:
    """Return the numbers of the preprocessing processes that score groups; none without a reference."""
    return range(recipe.num_preprocess_workers if recipe.loss.kl_coefficient is not None else 0)


def _num_ahead(recipe: Recipe) -> int:
    return _BATCHES_AHEAD * recipe.batch.batch_size // recipe.batch.group_size


def check_streams(recipe: Recipe) -> None:
    """Check the recipe's streams. Raises: RecipeError if they cannot be used, MissingExtraError without a package."""
    offered = _offered(f"midflight:check:{os.getpid()}", Path(), TrainingBatch) | {"patience_s": _CHECK_PATIENCE_S}
    constructor = STREAMS.bind(recipe.streams.type, offered, options_of(recipe.streams))
    if isinstance(recipe.streams, RedisStreamsConfig):
        try:
            with contextlib.closing(constructor()) as stream:
                stream.remove()
        except StreamError as error:
            raise RecipeError(f"streams: {error}") from error


def _open(
    run: RunDirectory, recipe: Recipe, path: Path, record_type: type[Record], capacity: int = _CAPACITY
) -> Stream[Record]:
    offered = _offered(f"midflight:{run.identity}:{path.stem}", path, record_type, capacity)
    return STREAMS.make(recipe.streams.type, offered, options_of(recipe.streams))


def _offered(name: str, path: Path, record_type: type[Any], capacity: int = _CAPACITY) -> dict[str, Any]:
    return {"name": name, "path": path, "record_type": record_type, "capacity": capacity}
