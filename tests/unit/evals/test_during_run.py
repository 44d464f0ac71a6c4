"""Evaluations beside training rollouts: the real rollout loop under every schedule, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from midflight.actor.actor import Actor, ActorConfig
from midflight.actor.loop import Intervals, RolloutLoop
from midflight.actor.shares import FIRST_EVALUATION_ID, Shares
from midflight.evals.answering import Evaluator, QuestionSet
from midflight.evals.during_run import EvaluationDuringRun
from midflight.evals.evaluate import EvaluationPlan
from midflight.generation.pool import EnginePool
from midflight.models.prompts import PromptFormat
from midflight.protocols import Schedule
from midflight.schedules.april import AprilSchedule
from midflight.schedules.bounded import BoundedSchedule, one_step_off
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule
from midflight.streams.memory import MemoryStream
from midflight.testing.fakes import CountingEnvironment, DigitTokenizer, ImmediateGrader, ScriptedGenerator
from midflight.tracing.spans import Tracer
from midflight.types import ChosenBatch, Completion, FleetView, Problem, SamplingParams

BATCH, GROUP, EVERY = 8, 2, 4
PROBLEMS = [Problem(f"{100 + index}", prompt="1") for index in range(5)]
SCHEDULES: dict[str, Schedule] = {
    "pipeline": PipelineSchedule(BATCH, num_in_flight=12, queue_capacity=BATCH),
    "pipeline, max_lag": PipelineSchedule(BATCH, num_in_flight=12, queue_capacity=4 * BATCH, max_lag=2),
    "pipeline, drop_oldest": PipelineSchedule(BATCH, num_in_flight=12, queue_capacity=BATCH, when_full="drop_oldest"),
    "conventional": ConventionalSchedule(BATCH),
    "conventional, 2 steps": ConventionalSchedule(BATCH, steps_per_rl_step=2),
    "april": AprilSchedule(BATCH, GROUP, over_sampling=1.5),
    "bounded": BoundedSchedule(BATCH, max_lag=2),
    "bounded, boundary": BoundedSchedule(BATCH, max_lag=3, updates="boundary"),
    "one step off": one_step_off(BATCH),
}
# Lag that a schedule promises, with or without evaluations (optimizer steps).
BOUNDS = {"conventional": 0, "conventional, 2 steps": 1, "pipeline, max_lag": 2, "bounded": 2, "bounded, boundary": 3}


class CountingGenerator(ScriptedGenerator):
    """Generator that counts the tokens it samples, and keeps the completions of evaluations."""

    def __init__(self, answer_steps: int, update_steps: int) -> None:
        super().__init__(
            lambda rollout: answer_steps if rollout >= FIRST_EVALUATION_ID else 2 + rollout * 7 % 11, update_steps
        )
        self.num_sampled = 0
        self.evaluated: list[Completion] = []

    def step(self) -> list[Completion]:
        self.num_sampled += self.num_in_flight
        completions = super().step()
        self.evaluated += [item for item in completions if item.rollout_id >= FIRST_EVALUATION_ID]
        return completions


class Versions:
    """The newest version of a trainer."""

    version = 0

    def newest_version(self) -> int:
        return self.version

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        return self.version > newer_than

    def close(self) -> None: ...


class Run:
    """The rollout loop of a run, and a trainer that takes `train_ticks` iterations for a step."""

    def __init__(
        self,
        schedule: Schedule,
        answer_steps: int = 6,
        train_ticks: int = 5,
        every: int = EVERY,
        newest_evaluated: int = 0,
        update_steps: int = 0,
        num_in_flight: int = 2,
        grade_delay: int = 0,
        pool_of: int = 0,
    ) -> None:
        self.results: list[tuple[int, dict[str, Any]]] = []
        self.weights, self.stream = Versions(), MemoryStream[ChosenBatch](capacity=1000)
        self.batches: list[ChosenBatch] = []
        self.train_ticks, self._done_at, self.tick = train_ticks, 0, 0
        self.generator = CountingGenerator(answer_steps, update_steps)
        pool = EnginePool(0)
        for index in range(pool_of):
            pool.join(str(index), CountingGenerator(answer_steps, update_steps + index))
        environment = CountingEnvironment(lambda index: float(index % 2))
        shares = Shares(pool if pool_of else self.generator, ImmediateGrader(environment, lambda rollout: grade_delay))
        evaluator = Evaluator(
            shares.evaluation_generator,
            environment,
            shares.evaluation_grader,
            PromptFormat(DigitTokenizer()),
            0,
            num_in_flight,
        )
        questions = QuestionSet("some", PROBLEMS, SamplingParams(max_tokens=100), samples=2)
        self.evaluation = EvaluationDuringRun(
            evaluator, EvaluationPlan((questions,), None, 5), every, newest_evaluated, self.report
        )
        config = ActorConfig(BATCH, GROUP, SamplingParams(max_tokens=100), seed=0)
        self.shared = shares.generator
        self.actor = Actor(config, shares.generator, environment, shares.grader, PromptFormat(DigitTokenizer()))
        self.loop = RolloutLoop(
            self.actor,
            shares.generator,
            schedule,
            self.weights,
            self.stream,
            Tracer(None, "test"),
            intervals=Intervals(grades_s=0),
            evaluation=self.evaluation,
        )

    def report(self, version: int, line: dict[str, Any]) -> None:
        self.results.append((version, line))

    @property
    def evaluated(self) -> list[int]:
        return [version for version, _ in self.results]

    def iteration(self) -> None:
        version = self.weights.version
        self.loop.iteration(max(version, self.shared.weight_version))
        self.tick += 1
        if not self._done_at and self.stream.next_offset() > version:
            self.batches += self.stream.read(version, timeout_s=0)
            self._done_at = self.tick + self.train_ticks
        if self._done_at and self.tick >= self._done_at:
            self.weights.version, self._done_at = version + 1, 0

    def until_version(self, version: int) -> Run:
        while self.weights.version < version:
            self.iteration()
            assert self.tick < 5000, f"stuck at version {self.weights.version} with {self.stream.next_offset()} batches"
        return self

    def until_evaluating(self) -> Run:
        while not self.evaluation.is_running:
            self.iteration()
            assert self.tick < 5000
        return self


@pytest.mark.parametrize("update_steps", [0, 3])
@pytest.mark.parametrize("train_ticks", [1, 30])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_evaluates_single_versions(name: str, train_ticks: int, update_steps: int) -> None:
    run = Run(SCHEDULES[name], train_ticks=train_ticks, update_steps=update_steps, num_in_flight=10, answer_steps=2)
    run.until_version(4 * EVERY + 3)
    assert run.evaluated == [EVERY, 2 * EVERY, 3 * EVERY, 4 * EVERY]
    versions = [set(completion.generated.weight_versions.tolist()) for completion in run.generator.evaluated]
    assert versions == [{version} for version in run.evaluated for _ in range(10)]


@pytest.mark.parametrize("name", BOUNDS)
def test_long_evaluations_keep_the_bound_on_the_lag(name: str) -> None:
    run = Run(SCHEDULES[name], answer_steps=40).until_version(20)
    lags = [
        batch.index - version
        for batch in run.batches
        for group in batch.groups
        for rollout in group.rollouts
        for version in rollout.generated.weight_versions.tolist()
    ]
    assert run.evaluated
    assert max(lags) <= BOUNDS[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_training_loses_nothing_to_evaluations(name: str) -> None:
    run = Run(SCHEDULES[name], grade_delay=2).until_version(13)
    state = run.actor.state
    trained = sum(len(batch.groups) for batch in run.batches)
    waiting = (state.num_batches - len(run.batches)) * BATCH // GROUP
    assert state.next_group_id == trained + waiting + len(state.open_group_ids) + state.num_dropped_groups
    ids = [rollout.rollout_id for batch in run.batches for group in batch.groups for rollout in group.rollouts]
    assert len(ids) == len(set(ids)) == len(run.batches) * BATCH
    assert max(ids) < FIRST_EVALUATION_ID


@pytest.mark.parametrize("name", SCHEDULES)
def test_tokens_of_training_and_evaluation_add_up(name: str) -> None:
    run = Run(SCHEDULES[name], answer_steps=9).until_version(10)
    run.loop.run(lambda: True)
    assert run.generator.num_sampled == run.actor.state.generated_tokens + run.evaluation.num_generated


def test_tokens_in_metrics_are_those_of_the_results() -> None:
    run = Run(SCHEDULES["conventional"]).until_version(6)
    while run.evaluation.is_running:
        run.iteration()
    run.until_version(7)
    in_metrics = sum(batch.metrics["eval/generated_tokens"] for batch in run.batches)
    assert in_metrics == sum(line["generated_tokens"] for _, line in run.results) == 10 * 6


def test_figures_come_with_the_next_batch() -> None:
    run = Run(SCHEDULES["conventional"], answer_steps=1).until_version(6)
    (line,) = [batch.metrics for batch in run.batches if "eval/version" in batch.metrics]
    assert line["eval/version"] == EVERY
    assert (line["eval/some/avg@2"], line["eval/some/pass@2"]) == (0.4, 0.4)
    assert line["eval/some/avg@2_error"] == pytest.approx(0.6**0.5 * 0.4**0.5 / 2)


def test_generation_and_training_go_on_during_an_evaluation() -> None:
    run = Run(SCHEDULES["pipeline"], answer_steps=60, train_ticks=1).until_evaluating()
    started, version = run.actor.state.next_group_id, run.weights.version
    while run.evaluation.is_running:
        run.iteration()
        assert run.generator.weight_version == EVERY
    assert run.actor.state.next_group_id > started + BATCH
    assert run.weights.version > version + EVERY
    run.iteration()
    assert run.generator.weight_version == run.weights.version


def test_versions_that_pass_during_an_evaluation_are_left_out() -> None:
    run = Run(SCHEDULES["pipeline"], answer_steps=60, train_ticks=1, num_in_flight=10).until_version(60)
    assert run.evaluated[0] == EVERY
    assert all(version % EVERY == 0 for version in run.evaluated)
    assert 1 < len(run.evaluated) < 14


def test_a_fast_trainer_waits_for_the_engines_only_at_evaluated_versions() -> None:
    """Engines that adopt weights slowly skip versions, but never one that is evaluated."""
    run = Run(SCHEDULES["pipeline"], train_ticks=1, update_steps=9, answer_steps=1, num_in_flight=10)
    versions = set()
    while run.weights.version < 17:
        run.iteration()
        versions.add(run.generator.weight_version)
    assert {EVERY, 2 * EVERY, 3 * EVERY, 4 * EVERY} <= versions
    assert len(versions) < 17


class SkippingSchedule(ConventionalSchedule):
    """Schedule of the user that adopts every third version only."""

    def should_update_weights(self, fleet: FleetView) -> bool:
        return fleet.newest_version >= fleet.version + 3


def test_a_schedule_that_skips_versions_is_not_stopped() -> None:
    run = Run(SkippingSchedule(BATCH, steps_per_rl_step=3), every=4).until_version(30)
    assert run.evaluated == [12, 24]


def test_a_stopped_evaluation_leaves_no_result() -> None:
    run = Run(SCHEDULES["pipeline"], answer_steps=50).until_evaluating()
    run.iteration()
    run.loop.run(lambda: True)
    assert (run.results, run.generator.num_in_flight, run.evaluation.is_running) == ([], 0, False)


@pytest.mark.parametrize(("newest_evaluated", "expected"), [(0, [4, 8]), (4, [8]), (8, [])])
def test_evaluated_versions_are_not_evaluated_again(newest_evaluated: int, expected: Sequence[int]) -> None:
    run = Run(SCHEDULES["conventional"], newest_evaluated=newest_evaluated, answer_steps=1).until_version(10)
    assert run.evaluated == expected


def test_a_pool_of_engines_evaluates_single_versions() -> None:
    run = Run(SCHEDULES["pipeline"], num_in_flight=10, answer_steps=3, pool_of=2).until_version(3 * EVERY)
    assert run.evaluated[0] == EVERY
    assert all(line["sets"]["some"]["num_ungraded"] == 0 for _, line in run.results)
    tokens = sum(line["generated_tokens"] for _, line in run.results)
    assert tokens == 10 * 3 * len(run.results)
