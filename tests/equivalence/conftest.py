"""A whole run in one process: the two real loops in two threads, over a memory stream and in-process weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from midflight.actor.actor import Actor
from midflight.actor.loop import Intervals, RolloutLoop
from midflight.config import Recipe, load_recipe
from midflight.launch.build import (
    build_actor_config,
    build_engine,
    build_preprocessing,
    build_schedule,
    build_trainer,
)
from midflight.launch.environments import build_environment
from midflight.launch.objectives import build_objective
from midflight.metrics.jsonl import JsonlWriter, read_metrics
from midflight.models.loading import load_config, load_tokenizer
from midflight.streams.codec import Codec
from midflight.streams.memory import MemoryStream
from midflight.testing.fakes import ImmediateGrader, InProcessWeights
from midflight.tracing.spans import Tracer
from midflight.trainer.checkpoints import TrainerState
from midflight.trainer.loop import LoopSettings, TrainLoop
from midflight.types import ActorState, TrainingBatch

RECIPE = Path(__file__).parents[2] / "recipes" / "cpu_demo.toml"


@dataclass
class FinishedRun:
    recipe: Recipe
    batches: list[TrainingBatch]
    weights: InProcessWeights
    trainer: TrainerState
    actor: ActorState
    metrics: list[dict[str, object]]


@pytest.fixture
def run_recipe(tmp_path: Path) -> Callable[..., FinishedRun]:
    def run(*overrides: str) -> FinishedRun:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        return run_in_threads(load_recipe(RECIPE, overrides), directory)

    return run


class _Recorder(MemoryStream[TrainingBatch]):
    """A memory stream that also keeps what was trimmed."""

    def __init__(self) -> None:
        super().__init__(capacity=1000)
        self.appended: list[TrainingBatch] = []

    def append(self, record: TrainingBatch, timeout_s: float | None = None) -> int | None:
        self.appended.append(record)
        return super().append(record, timeout_s)


@dataclass
class Loops:
    """The two loops of a run and what is between them; the first weights are published."""

    weights: InProcessWeights
    stream: _Recorder
    actor: Actor
    rollouts: RolloutLoop
    training: TrainLoop


def build_loops(recipe: Recipe, directory: Path, metrics: JsonlWriter) -> Loops:
    weights, stream, tracer = InProcessWeights(), _Recorder(), Tracer(None, "test")
    backend = build_trainer(recipe, weights)
    backend.init(rank=0)
    backend.publish_weights(0)
    schedule, tokenizer = build_schedule(recipe), load_tokenizer(recipe.model.path)
    engine = build_engine(recipe, load_config(recipe.model.path), weights.receive()[1], num_rows=schedule.max_in_flight)
    environment = build_environment(recipe)
    actor_config = build_actor_config(recipe, tokenizer)
    actor = Actor(actor_config, engine, schedule, environment, ImmediateGrader(environment), tokenizer)
    every_turn = Intervals(grades_s=0)
    preprocessing = build_preprocessing(recipe)
    rollouts = RolloutLoop(actor, engine, schedule, weights, stream, preprocessing, tracer, intervals=every_turn)
    settings = LoopSettings(
        max_steps=recipe.trainer.max_steps,
        max_seconds=None,
        checkpoint_every=10**9,
        keep_checkpoints=1,
        max_nonfinite_steps=5,
        checkpoints=directory / "checkpoints",
        rejected_batches=directory / "rejected",
    )
    training = TrainLoop(
        settings, backend, build_objective(recipe), stream, metrics, Tracer(None, "test"), TrainerState(),
        Codec(TrainingBatch).encode,
    )  # fmt: skip
    return Loops(weights, stream, actor, rollouts, training)


def run_in_threads(recipe: Recipe, directory: Path) -> FinishedRun:
    trained, ended = threading.Event(), threading.Event()
    with JsonlWriter(directory / "metrics.jsonl") as metrics:
        loops = build_loops(recipe, directory, metrics)

        def generate() -> None:
            loops.rollouts.run(trained.is_set)
            ended.set()

        thread = threading.Thread(target=generate)
        thread.start()
        try:
            loops.training.run(lambda: not thread.is_alive())
        finally:
            trained.set()
            thread.join()
    assert ended.is_set(), "the rollout loop failed"
    return FinishedRun(
        recipe,
        loops.stream.appended,
        loops.weights,
        loops.training.state,
        loops.actor.state,
        read_metrics(directory / "metrics.jsonl"),
    )
