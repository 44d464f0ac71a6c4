"""Real loops of a run in one process, over memory streams, for the digest and the equivalence tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from midflight.actor.actor import Actor
from midflight.actor.loop import BatchSink, Intervals, RolloutLoop
from midflight.actor.shares import Shares
from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.engine.delegating import DelegatingGenerator
from midflight.evals.during_run import EvaluationDuringRun
from midflight.launch.build import (
    build_actor_config,
    build_learning_rates,
    build_preprocessing,
    build_scorer,
    build_trainer,
    recipe_schedule,
)
from midflight.launch.engines import build_engine
from midflight.launch.environments import build_all_environments
from midflight.launch.objectives import build_objective
from midflight.launch.prompts import build_prompts
from midflight.launch.streams import scoring_workers
from midflight.metrics.jsonl import JsonlWriter
from midflight.models.loading import load_config, load_tokenizer
from midflight.preprocess.ahead import AheadOfBatches, OtherWorker, SendAhead
from midflight.preprocess.loop import PreprocessAtOnce, PreprocessLoop, Preprocessor, ScoringLoop
from midflight.protocols import Generator, LocalEngine, Record, WeightReceiver
from midflight.run.evaluation import evaluation_during_run, num_slots
from midflight.streams.codec import Codec
from midflight.streams.memory import MemoryStream
from midflight.testing.fakes import ImmediateGrader, InProcessWeights
from midflight.tracing.spans import Tracer
from midflight.trainer.loop import LoopSettings, TrainLoop
from midflight.trainer.state import TrainerState
from midflight.trainer.step import TrainStep
from midflight.types import ChosenBatch, Completion, GroupScores, GroupToScore, TrainingBatch

TRAIN_TICKS = 7  # iterations of the rollout loop during one optimizer step, in `run_steps`


class Recorder(MemoryStream[TrainingBatch]):
    """Memory stream that also keeps all appended records."""

    def __init__(self) -> None:
        super().__init__(capacity=1000)
        self.appended: list[TrainingBatch] = []

    def append(self, record: TrainingBatch, timeout_s: float | None = None) -> int | None:
        self.appended.append(record)
        return super().append(record, timeout_s)


class CodedStream(MemoryStream[Record]):
    """Memory stream that encodes and decodes each record, as between two processes."""

    def __init__(self, record_type: type[Record], capacity: int = 1000) -> None:
        super().__init__(capacity)
        self._codec = Codec(record_type)

    def append(self, record: Record, timeout_s: float | None = None) -> int | None:
        return super().append(self._codec.decode(self._codec.encode(record)), timeout_s)


class PullsAtOnce(DelegatingGenerator):
    """Implements Generator by a LocalEngine: `adopt` stages the newest weights in the caller's thread.

    So the token from which on a version is used does not depend on the machine's speed.
    """

    def __init__(self, engine: LocalEngine, receiver: WeightReceiver) -> None:
        super().__init__(engine)
        self._engine, self._receiver = engine, receiver
        self._adopted = 0

    @property
    def weight_version(self) -> int:
        return max(self._adopted, self._engine.weight_version)

    def step(self) -> list[Completion]:
        return self._engine.step()

    def adopt(self, version: int) -> None:
        incoming = self._receiver.receive()
        self._engine.stage(incoming)
        self._engine.adopt(version)
        self._adopted = incoming.version  # samples the next token


class _SameThreadWeights(InProcessWeights):
    """Weights that nobody sends during a wait: the trainer runs in the thread that waits.

    A version without changes counts as new tensors. Otherwise the engine would keep its prefixes, and log-probabilities
    would be rounded differently from those of a run that publishes every step.
    """

    def relabel(self, version: int) -> None:
        self.send(version, self.sent[max(self.sent)].items())

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        return super().wait(newer_than, timeout_s=0)


@dataclass
class Loops:
    """Loops of a run and the streams between them; the first weights are already published."""

    weights: InProcessWeights
    stream: Recorder
    actor: Actor
    rollouts: RolloutLoop
    training: TrainLoop
    preprocess: list[PreprocessLoop | ScoringLoop]  # empty: preprocessing is part of the rollout loop
    evaluation: EvaluationDuringRun | None  # None: the recipe has no eval.every


def build_loops(
    recipe: Recipe,
    directory: Path,
    metrics: JsonlWriter,
    generator_of: Callable[[Generator], Generator] = lambda engine: engine,
) -> Loops:
    """Build the loops of a run. `generator_of`: wraps the engine, for measurements."""
    weights, stream, tracer = _SameThreadWeights(), Recorder(), Tracer(None, "test")
    backend = build_trainer(recipe, weights)
    backend.init(rank=0)
    backend.publish_weights(0)
    schedule, prompts = recipe_schedule(recipe), build_prompts(recipe, load_tokenizer(recipe.model.path))
    engine = build_engine(
        recipe,
        load_config(recipe.model.path),
        dict(weights.receive().tensors),
        max_num_seqs=schedule.max_in_flight + num_slots(recipe),
    )
    environment = build_all_environments(recipe)
    shares = Shares(generator_of(PullsAtOnce(engine, weights)), ImmediateGrader(environment))
    evaluation = evaluation_during_run(recipe, RunDirectory(directory), 0, shares, environment, prompts)
    actor_config = build_actor_config(recipe, prompts)
    sink, on_ready, preprocess = _preprocessing(recipe, stream, tracer)
    actor = Actor(actor_config, shares.generator, environment, shares.grader, prompts, on_ready=on_ready)
    every_iteration = Intervals(grades_s=0)
    rollouts = RolloutLoop(
        actor, shares.generator, schedule, weights, sink, tracer, intervals=every_iteration, evaluation=evaluation
    )
    settings = LoopSettings(
        max_steps=recipe.trainer.max_steps,
        checkpoint_every=10**9,
        checkpoints=directory / "checkpoints",
        keep_checkpoints=recipe.trainer.keep_checkpoints,
        rejected_batches=directory / "rejected",
    )
    step = TrainStep(backend, build_objective(recipe), build_learning_rates(recipe))
    training = TrainLoop(settings, step, stream, TrainerState(), Tracer(None, "test"), metrics)
    return Loops(weights, stream, actor, rollouts, training, preprocess, evaluation)


def _preprocessing(
    recipe: Recipe, batches: Recorder, tracer: Tracer
) -> tuple[BatchSink, SendAhead | None, list[PreprocessLoop | ScoringLoop]]:
    """Build the sink of the rollout loop, the sender of finished groups, and the loop of every worker."""
    preprocessing = build_preprocessing(recipe)
    has_reference = recipe.loss.kl_coefficient is not None
    if not recipe.num_preprocess_workers:
        scored = AheadOfBatches(build_scorer(recipe, tracer), preprocessing, tracer) if has_reference else None
        return PreprocessAtOnce(batches, Preprocessor(preprocessing, tracer, scored)), None, []
    groups, own = CodedStream(ChosenBatch), Tracer(None, "test")
    if not has_reference:
        return groups, None, [PreprocessLoop(groups, batches, Preprocessor(preprocessing, own), own)]
    unscored = [CodedStream(GroupToScore) for _ in scoring_workers(recipe)]
    scores = [CodedStream(GroupScores) for _ in unscored[1:]]
    others = [OtherWorker(*streams) for streams in zip(unscored[1:], scores, strict=True)]
    ahead = AheadOfBatches(build_scorer(recipe, own), preprocessing, own, unscored[0], others)
    loops: list[PreprocessLoop | ScoringLoop] = [
        PreprocessLoop(groups, batches, Preprocessor(preprocessing, own, ahead), own)
    ]
    for other in others:
        tracer_of_other = Tracer(None, "test")
        scorer = build_scorer(recipe, tracer_of_other)
        loops.append(ScoringLoop(other.share, other.scores, scorer, tracer_of_other))
    return groups, SendAhead(unscored, preprocessing, tracer), loops


def run_steps(
    recipe: Recipe,
    directory: Path,
    num_steps: int,
    generator_of: Callable[[Generator], Generator] = lambda engine: engine,
) -> Loops:
    """Train in one thread on a virtual clock: an optimizer step takes TRAIN_TICKS iterations of the rollout loop.

    Every version has a checkpoint; the recipe says how many of them are kept.
    """
    with JsonlWriter(directory / "metrics.jsonl") as metrics:
        loops = build_loops(recipe, directory, metrics, generator_of)
        state, end_of_step = loops.training.state, None
        for tick in count():
            if tick == end_of_step:
                version, end_of_step = state.version, None
                loops.training.run(functools.partial(_has_passed, state, version))
                if state.version == num_steps:
                    break
            if end_of_step is None and loops.stream.next_offset() > state.version:
                end_of_step = tick + TRAIN_TICKS
            loops.rollouts.iteration(state.version)
    return loops


def _has_passed(state: TrainerState, version: int) -> bool:
    return state.version > version
