"""Accuracy on held-out problems: sampled at temperature 1, and greedy."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from midflight.protocols import Environment, Generator, Grader
from midflight.types import FinishReason, GenerationRequest, Problem, RolloutId, SamplingParams

_WAIT_SLICE_S = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracies are the mean reward; by difficulty in buckets 1, 2, 3, 4, 5-8, 9-16, ..."""

    num_problems: int
    sampled_accuracy: float
    greedy_accuracy: float
    sampled_accuracy_by_difficulty: dict[str, float]
    hard_from: int  # the difficulty that counts as hard
    num_hard_problems: int
    sampled_accuracy_hard: float | None
    mean_length: float  # tokens, sampled
    num_ungraded: int  # answers, sampled and greedy, that the verifier could not grade; they count as wrong


def evaluate(
    generator: Generator,
    environment: Environment,
    grader: Grader,
    tokenizer: Any,
    sampling: SamplingParams,
    *,
    num_problems: int,
    hard_from: int,
    seed: int,
) -> Evaluation:
    """One sampled and one greedy answer to each held-out problem.

    Raises: RolloutError if the grader gives up.
    """
    problems = environment.held_out_problems(num_problems)
    prompts = [np.array(tokenizer.encode(problem.prompt), np.int32) for problem in problems]
    failures: list[str] = []

    def answers(params: SamplingParams) -> tuple[np.ndarray[Any, np.dtype[np.float64]], float]:
        """The reward of each answer, 0 if it has no grade, and their mean length."""
        generator.add(
            [GenerationRequest(RolloutId(index), prompt, params, seed) for index, prompt in enumerate(prompts)]
        )
        rewards, lengths = np.zeros(len(problems)), np.zeros(len(problems))
        while generator.num_in_flight or grader.num_pending:
            for completion in generator.step():
                stopped = completion.finish_reason is FinishReason.STOP
                token_ids = completion.generated.token_ids[: -1 if stopped else None]
                problem = problems[completion.rollout_id]
                grader.submit(completion.rollout_id, problem, tokenizer.decode(token_ids))
                lengths[completion.rollout_id] = len(completion.generated)
            for graded in grader.results(0.0 if generator.num_in_flight else _WAIT_SLICE_S):
                if graded.grade is None:
                    failures.append(graded.failure)
                else:
                    rewards[graded.rollout_id] = graded.grade.reward
        return rewards, float(lengths.mean())

    sampled, mean_length = answers(sampling)
    greedy, _ = answers(replace(sampling, temperature=0.0))
    if failures:
        logger.warning("%d answers to held-out problems could not be graded; the last: %s", len(failures), failures[-1])
    hard = np.array([problem.difficulty >= hard_from for problem in problems])
    return Evaluation(
        num_problems=num_problems,
        sampled_accuracy=float(sampled.mean()),
        greedy_accuracy=float(greedy.mean()),
        sampled_accuracy_by_difficulty=_by_difficulty(problems, sampled),
        hard_from=hard_from,
        num_hard_problems=int(hard.sum()),
        sampled_accuracy_hard=float(sampled[hard].mean()) if hard.any() else None,
        mean_length=mean_length,
        num_ungraded=len(failures),
    )


def _by_difficulty(problems: Sequence[Problem], rewards: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    buckets: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for problem, reward in zip(problems, rewards, strict=True):
        buckets[_bucket(problem.difficulty)].append(float(reward))
    return {
        str(low) if low == high else f"{low}-{high}": float(np.mean(values))
        for (low, high), values in sorted(buckets.items())
    }


def _bucket(difficulty: int) -> tuple[int, int]:
    """Single values up to 4, then doubling ranges."""
    if difficulty <= 4:
        return difficulty, difficulty
    high = 1 << (difficulty - 1).bit_length()
    return high // 2 + 1, high
