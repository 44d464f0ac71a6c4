"""One pass of a policy over sets of problems: several responses to each problem, generated and graded.

The owner of the generator calls `step`, so that training rollouts can run beside an evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from midflight.actor.episodes import Episodes
from midflight.actor.shares import FIRST_EVALUATION_ID
from midflight.models.prompts import PromptFormat
from midflight.protocols import Environment, Generator, GradedTask, Grader
from midflight.types import (
    BoolArray,
    FinishReason,
    Float64Array,
    GroupId,
    Problem,
    Rollout,
    RolloutId,
    RolloutStatus,
    SamplingParams,
)

# Distance between the first rollout ids of two sets: more than any set has responses.
_IDS_PER_SET = 1 << 32


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Problems and the sampling of their responses."""

    name: str
    problems: Sequence[Problem]
    sampling: SamplingParams
    samples: int = 1  # responses per problem
    max_length: int | None = None  # of a rollout (tokens); None: no limit
    # Component of a grade that is at least 1 for a right response, if there is no `accuracy`; None: the reward is.
    correct_component: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerTable:
    """Graded responses to a set, one row per problem; arrays `[problems, samples]`.

    A response without a grade has reward 0, is wrong, and has no answer.
    """

    questions: QuestionSet
    rewards: Float64Array
    correct: BoolArray
    answers: list[list[str | None]]
    lengths: Float64Array  # tokens
    truncated: BoolArray  # True if the response was cut off at its largest length
    failures: list[str]  # reasons of responses without a grade


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The parts that generate and grade responses."""

    generator: Generator
    environment: Environment | GradedTask
    grader: Grader
    prompts: PromptFormat
    seed: int
    num_in_flight: int  # largest number of responses in flight


class Answering:
    """Responses to the question sets, one set after the other.

    Random numbers depend on the seed, the position of the set, the problem and the sample only. Therefore, the same
    weights give the same answers beside training rollouts and alone.
    """

    def __init__(self, evaluator: Evaluator, sets: Sequence[QuestionSet]) -> None:
        self._evaluator = evaluator
        self._sets = deque(enumerate(sets))
        self._episodes: Episodes | None = None
        self._groups: dict[GroupId, list[Rollout]] = {}  # responses to each problem of the current set
        self._to_start: Iterator[tuple[Rollout, Problem]] = iter(())
        self._open: set[RolloutId] = set()  # started and not done
        self._num_generating = 0
        self._num_generated_before = 0
        self.tables: list[AnswerTable] = []  # of the sets that are complete
        self.weight_versions: set[int] = set()  # versions that sampled a token of a complete set

    @property
    def is_done(self) -> bool:
        return self._episodes is None and not self._sets

    @property
    def is_generating(self) -> bool:
        """True if a response is in flight; otherwise, all started ones wait for their grades."""
        return self._num_generating > 0

    @property
    def num_generated(self) -> int:
        """Number of tokens of turns that have ended or were interrupted, in all sets."""
        return self._num_generated_before + (self._episodes.num_generated if self._episodes else 0)

    def step(self, timeout_s: float = 0.0) -> None:
        """Start responses, process the ones that ended, and collect grades; wait up to `timeout_s` for the first."""
        if self._episodes is None:
            if not self._sets:
                return
            self._episodes = self._begin(*self._sets.popleft())
        self._start(self._episodes)
        ended = self._episodes.step()
        self._num_generating -= len(ended)
        answered = self._episodes.answers(timeout_s)
        self._num_generating += sum(rollout.status is RolloutStatus.RUNNING for rollout in answered)
        self._open -= {rollout.rollout_id for rollout in (*ended, *answered) if rollout.is_done}
        if not self._open and not self._num_generating:
            self._start(self._episodes)
        if not self._open:
            self._end(self._episodes)

    def stop(self) -> None:
        """Abort the responses in flight; no table of an incomplete set remains."""
        if self._episodes is not None:
            self._episodes.interrupt(list(self._open))
            self._num_generated_before, self._episodes = self.num_generated, None
        self._sets.clear()

    def _begin(self, index: int, questions: QuestionSet) -> Episodes:
        evaluator = self._evaluator
        episodes = Episodes(
            evaluator.generator,
            evaluator.environment,
            evaluator.grader,
            evaluator.prompts,
            questions.sampling,
            evaluator.seed,
            questions.max_length,
            group_of=lambda rollout: self._groups[rollout.group_id],
        )
        self._questions, self._groups = questions, {}
        self._to_start = self._new_rollouts(episodes, questions, FIRST_EVALUATION_ID + index * _IDS_PER_SET)
        return episodes

    def _new_rollouts(
        self, episodes: Episodes, questions: QuestionSet, first_id: int
    ) -> Iterator[tuple[Rollout, Problem]]:
        for number, problem in enumerate(questions.problems):
            first = first_id + number * questions.samples
            ids = [RolloutId(rollout_id) for rollout_id in range(first, first + questions.samples)]
            rollouts = self._groups[GroupId(number)] = episodes.new_rollouts(problem, GroupId(number), ids)
            for rollout in rollouts:
                yield rollout, problem

    def _start(self, episodes: Episodes) -> None:
        """Start responses until `num_in_flight` are in flight. A response that the generator refuses is done."""
        while (room := self._evaluator.num_in_flight - self._num_generating) > 0:
            pairs = list(islice(self._to_start, room))
            if not pairs:
                return
            episodes.start(pairs)
            running = {rollout.rollout_id for rollout, _ in pairs if not rollout.is_done}
            self._open |= running
            self._num_generating += len(running)

    def _end(self, episodes: Episodes) -> None:
        rollouts = list(chain.from_iterable(self._groups.values()))
        self.tables.append(_table(self._questions, rollouts))
        versions = (rollout.generated.weight_versions for rollout in rollouts)
        self.weight_versions.update(*(np.unique(version).tolist() for version in versions))
        self._num_generated_before += episodes.num_generated
        self._episodes = None


def _table(questions: QuestionSet, rollouts: Sequence[Rollout]) -> AnswerTable:
    shape = len(questions.problems), questions.samples
    answers = [rollout.answer for rollout in rollouts]
    return AnswerTable(
        questions,
        rewards=np.array([rollout.reward for rollout in rollouts], np.float64).reshape(shape),
        correct=np.array([_is_correct(rollout, questions) for rollout in rollouts], bool).reshape(shape),
        answers=[answers[start : start + shape[1]] for start in range(0, len(answers), shape[1])],
        lengths=np.array([rollout.num_sampled for rollout in rollouts], np.float64).reshape(shape),
        truncated=np.array([_is_truncated(rollout) for rollout in rollouts], bool).reshape(shape),
        failures=[rollout.failure for rollout in rollouts if rollout.status is RolloutStatus.FAILED],
    )


def _is_correct(rollout: Rollout, questions: QuestionSet) -> bool:
    components = rollout.reward_components
    by_term = components.get(questions.correct_component or "", rollout.reward)
    return rollout.status is RolloutStatus.FINISHED and components.get("accuracy", by_term) >= 1


def _is_truncated(rollout: Rollout) -> bool:
    return rollout.finish_reason is FinishReason.LENGTH
