"""Accuracy on held-out problems: sampled with the run's parameters, and greedy."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from midflight.actor.episodes import Episodes
from midflight.concurrency.wake_up import WAIT_SLICE_S
from midflight.models.prompts import PromptFormat
from midflight.protocols import Environment, Generator, GradedTask, Grader
from midflight.types import Float64Array, GroupId, Problem, RolloutId, RolloutStatus, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of an evaluation. An accuracy is the mean reward, or None without problems.

    Buckets of difficulty are 1, 2, 3, 4, 5-8, 9-16, ...
    """

    num_problems: int  # may be fewer than requested
    sampled_accuracy: float | None
    greedy_accuracy: float | None
    sampled_accuracy_by_difficulty: dict[str, float]
    hard_from: int  # the difficulty that counts as hard
    num_hard_problems: int
    sampled_accuracy_hard: float | None
    mean_length: float | None  # of the sampled responses (tokens)
    num_ungraded: int  # sampled and greedy responses that could not be graded; they count as wrong


@dataclass(frozen=True, slots=True)
class Answers:
    """Results of one response per problem, in the problems' order; both arrays `[problems]`."""

    rewards: Float64Array
    lengths: Float64Array  # tokens
    failures: list[str]  # reasons of responses without a grade


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Generates and grades responses to held-out problems."""

    generator: Generator
    environment: Environment | GradedTask
    grader: Grader
    prompts: PromptFormat
    seed: int
    max_length: int | None = None  # of a rollout (tokens); None: no limit

    def answers(self, problems: Sequence[Problem], sampling: SamplingParams) -> Answers:
        """Generate one response to each problem; a response without a grade has reward 0.

        Raises: RolloutError if the grader gives up.
        """
        episodes = Episodes(
            self.generator, self.environment, self.grader, self.prompts, sampling, self.seed, self.max_length
        )
        rollouts = [
            rollout
            for index, problem in enumerate(problems)
            for rollout in episodes.new_rollouts(problem, GroupId(index), [RolloutId(index)])
        ]
        episodes.start(list(zip(rollouts, problems, strict=True)))
        while self.generator.num_in_flight or self.grader.num_pending:
            episodes.step()
            episodes.answers(0.0 if self.generator.num_in_flight else WAIT_SLICE_S)
        return Answers(
            np.array([rollout.reward for rollout in rollouts]),
            np.array([rollout.num_sampled for rollout in rollouts], np.float64),
            [rollout.failure for rollout in rollouts if rollout.status is RolloutStatus.FAILED],
        )


def evaluate(evaluator: Evaluator, sampling: SamplingParams, *, num_problems: int, hard_from: int) -> Evaluation:
    """Evaluate one sampled and one greedy response to each held-out problem.

    Raises: RolloutError if the grader gives up.
    """
    problems = evaluator.environment.held_out_problems(num_problems)
    sampled = evaluator.answers(problems, sampling)
    greedy = evaluator.answers(problems, replace(sampling, temperature=0.0))
    failures = sampled.failures + greedy.failures
    if failures:
        logger.warning(
            "%d responses to held-out problems could not be graded; the last reason: %s", len(failures), failures[-1]
        )
    hard = np.array([problem.difficulty >= hard_from for problem in problems], bool)
    return Evaluation(
        num_problems=len(problems),
        sampled_accuracy=mean_or_none(sampled.rewards),
        greedy_accuracy=mean_or_none(greedy.rewards),
        sampled_accuracy_by_difficulty=_by_difficulty(problems, sampled.rewards),
        hard_from=hard_from,
        num_hard_problems=int(hard.sum()),
        sampled_accuracy_hard=mean_or_none(sampled.rewards[hard]),
        mean_length=mean_or_none(sampled.lengths),
        num_ungraded=len(failures),
    )


def mean_or_none(values: Float64Array) -> float | None:
    """Return the mean, or None if there are no values."""
    return float(values.mean()) if len(values) else None


def _by_difficulty(problems: Sequence[Problem], rewards: Float64Array) -> dict[str, float]:
    buckets: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for problem, reward in zip(problems, rewards, strict=True):
        buckets[_bucket(problem.difficulty)].append(float(reward))
    return {
        str(low) if low == high else f"{low}-{high}": float(np.mean(values))
        for (low, high), values in sorted(buckets.items())
    }


def _bucket(difficulty: int) -> tuple[int, int]:
    """Bucket of a difficulty: single values up to 4, then doubling ranges."""
    if difficulty <= 4:
        return difficulty, difficulty
    high = 1 << (difficulty - 1).bit_length()
    return high // 2 + 1, high
