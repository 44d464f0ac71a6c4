"""avg@k, pass@k and maj@k of an answer table, with standard errors. Pure functions over arrays.

P problems, S samples per problem. Every figure is a mean over problems of one value per problem, `values_P`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from midflight.types import BoolArray, Float64Array


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems and its standard error; None with fewer than two problems."""

    value: float
    standard_error: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a set of problems, or of a part of it. `S` is the number of samples per problem."""

    num_problems: int
    avg: Estimate  # avg@S: mean reward
    pass_at: dict[str, Estimate]  # k -> pass@k, for k = 1, 2, 4, ... and S
    maj: Estimate | None  # maj@S; None if no answer was extracted from any response


def figures(rewards_PS: Float64Array, correct_PS: BoolArray, answers: Sequence[Sequence[str | None]]) -> Figures | None:
    """Return all figures of an answer table; None without problems."""
    num_problems, num_samples = rewards_PS.shape
    if not num_problems:
        return None
    num_correct_P = correct_PS.sum(axis=1)
    has_answers = any(answer is not None for row in answers for answer in row)
    return Figures(
        num_problems,
        avg=estimate(rewards_PS.mean(axis=1)),
        pass_at={str(k): estimate(pass_at_k(num_correct_P, num_samples, k)) for k in numbers_of_attempts(num_samples)},
        maj=estimate(majority_correctness(answers, correct_PS)) if has_answers else None,
    )


def estimate(values_P: Float64Array) -> Estimate:
    """Mean over problems, with the standard error sd(values) / sqrt(P), where sd has P - 1 degrees of freedom.

    The samples of a problem form one cluster: their mean is one value, so samples that agree do not lower the error.
    Source: Miller 2024, Adding Error Bars to Evals, eq. 1 over problem means.
    """
    num_problems = len(values_P)
    error = float(values_P.std(ddof=1) / np.sqrt(num_problems)) if num_problems > 1 else None
    return Estimate(float(values_P.mean()), error)


def pass_at_k(num_correct_P: npt.NDArray[np.int64], num_samples: int, k: int) -> Float64Array:
    """Unbiased estimate of the probability that one of k responses is right, 1 - C(n - c, k) / C(n, k).

    Shapes: num_correct_P [P], c of n = `num_samples` responses -> [P].
    Raises: ValueError unless 1 <= k <= num_samples.
    Source: Chen et al. 2021, eq. 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} is not between 1 and the {num_samples} samples of a problem")
    # C(n - c, k) / C(n, k) = prod over i of (n - c - i) / (n - i), for i < k; a factor is 0 if k > n - c.
    i = np.arange(k)
    wrong_left = np.maximum(num_samples - num_correct_P[:, None] - i, 0)
    all_wrong: Float64Array = np.prod(wrong_left / (num_samples - i), axis=1)
    return 1.0 - all_wrong


def majority_correctness(answers: Sequence[Sequence[str | None]], correct_PS: BoolArray) -> Float64Array:
    """Probability that the most frequent answer to each problem is right, `[P]`.

    Equal answers form a class; responses without an answer form one class, too. The value of a class is its share of
    right responses. If several classes are the largest, one of them is drawn, so the value is their mean.
    """
    return np.array([_majority(row, correct_PS[index]) for index, row in enumerate(answers)], np.float64)


def numbers_of_attempts(num_samples: int) -> list[int]:
    """Return the k of pass@k: powers of two up to the number of samples, and the number itself."""
    powers = [1 << exponent for exponent in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


def _majority(answers: Sequence[str | None], correct_S: BoolArray) -> float:
    classes: dict[str | None, list[bool]] = {}
    for answer, is_correct in zip(answers, correct_S.tolist(), strict=True):
        classes.setdefault(answer, []).append(is_correct)
    largest = max(map(len, classes.values()))
    return float(np.mean([np.mean(members) for members in classes.values() if len(members) == largest]))
