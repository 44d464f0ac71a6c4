"""A complete run in one process: the real loops in threads, with memory streams and in-process weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.loops import build_loops

from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe
from midflight.metrics.jsonl import JsonlWriter, read_metrics
from midflight.testing.fakes import InProcessWeights
from midflight.trainer.state import TrainerState
from midflight.types import ActorState, TrainingBatch

RECIPE = SHIPPED_RECIPES["cpu_demo"]


@dataclass
class FinishedRun:
    recipe: Recipe
    batches: list[TrainingBatch]
    weights: InProcessWeights
    trainer: TrainerState
    actor: ActorState
    metrics: list[dict[str, Any]]


RunRecipe = Callable[..., FinishedRun]


@pytest.fixture
def run_recipe(tmp_path: Path) -> RunRecipe:
    def run(*overrides: str) -> FinishedRun:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        return run_in_threads(load_recipe(RECIPE, overrides), directory)

    return run


@contextmanager
def _in_a_thread(run: Callable[[Callable[[], bool]], None]) -> Iterator[threading.Thread]:
    """Run a loop in a thread until the end of the block."""
    should_stop, ended = threading.Event(), threading.Event()

    def run_to_the_end() -> None:
        run(should_stop.is_set)
        ended.set()

    thread = threading.Thread(target=run_to_the_end)
    thread.start()
    try:
        yield thread
    finally:
        should_stop.set()
        thread.join()
    assert ended.is_set(), f"{run.__qualname__} failed"


def run_in_threads(recipe: Recipe, directory: Path) -> FinishedRun:
    with JsonlWriter(directory / "metrics.jsonl") as metrics, ExitStack() as stack:
        loops = build_loops(recipe, directory, metrics)
        runs = [loops.rollouts.run, *(loop.run for loop in loops.preprocess)]
        threads = [stack.enter_context(_in_a_thread(run)) for run in runs]
        loops.training.run(lambda: not all(thread.is_alive() for thread in threads))
    return FinishedRun(
        recipe,
        loops.stream.appended,
        loops.weights,
        loops.training.state,
        loops.actor.state,
        read_metrics(directory / "metrics.jsonl"),
    )
