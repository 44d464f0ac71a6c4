"""Response lengths in tokens: distributions for the formulas, draws for the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np

from midflight.errors import ScenarioError
from midflight.types import Float64Array, Int64Array


@dataclass(frozen=True)
class LengthDistribution:
    """Probability of each length 1, 2, ... `max`.

    Shapes: probabilities [max], for lengths 1 to max. Invariants: they add up to 1, and the last is above 0.
    """

    probabilities: Float64Array

    @property
    def max(self) -> int:
        """Longest possible length, L."""
        return len(self.probabilities)

    @cached_property
    def mean(self) -> float:
        return float(self._lengths @ self.probabilities)

    @cached_property
    def second_moment(self) -> float:
        """E[length^2]."""
        return float(self._lengths**2 @ self.probabilities)

    @cached_property
    def survival(self) -> Float64Array:
        """P(length >= l) for l = 1 ... max, `[max]`: share of a batch still being generated at its l-th token."""
        survival: Float64Array = np.minimum(self.probabilities[::-1].cumsum()[::-1], 1.0)
        return survival

    @property
    def distribution(self) -> LengthDistribution:
        return self

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int, group_size: int) -> Int64Array:
        """Draw independent lengths by inversion, one uniform number each; the group has no influence."""
        uniform = rng.random((num_groups, group_size)) * self._cumulative[-1]
        indices: Int64Array = np.searchsorted(self._cumulative, uniform, side="right").astype(np.int64)
        return 1 + indices

    @cached_property
    def _cumulative(self) -> Float64Array:
        return self.probabilities.cumsum()

    @property
    def _lengths(self) -> Float64Array:
        return np.arange(1.0, self.max + 1)


def uniform(max_length: int) -> LengthDistribution:
    """Lengths 1 to `max_length`, all equally likely."""
    return LengthDistribution(np.full(max_length, 1.0 / max_length))


def constant(length: int) -> LengthDistribution:
    return from_counts([length])


def two_point(short: int, long: int, long_share: float) -> LengthDistribution:
    """Length `long` with probability `long_share`, else `short`."""
    return from_counts([short, long], [1 - long_share, long_share])


def lognormal(median: float, sigma: float, max_length: int) -> LengthDistribution:
    """Length min(ceil(median * exp(sigma * z)), max_length), z normal: a long tail, cut off as an engine would do."""
    normal = NormalDist(math.log(median), sigma)
    cumulative = np.array([0.0, *(normal.cdf(math.log(length)) for length in range(1, max_length)), 1.0])
    return LengthDistribution(np.diff(cumulative))


def from_counts(lengths: Sequence[int], counts: Sequence[float] | None = None) -> LengthDistribution:
    """Distribution of `lengths`, weighted by `counts` (default: 1 each).

    Raises: ScenarioError if no length has a count above 0.
    """
    weights = np.trim_zeros(np.bincount(np.array(lengths, np.int64), counts), "b")[1:]
    if not len(weights):
        raise ScenarioError("counts: no length has a count above 0")
    return LengthDistribution(weights / weights.sum())


class Lengths(Protocol):
    """Source of the lengths of the simulator's rollouts."""

    @property
    def distribution(self) -> LengthDistribution:
        """Marginal distribution of one rollout's length, without regard to its group."""
        ...

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int, group_size: int) -> Int64Array:
        """Draw the lengths of `num_groups` groups, beginning with `first_group`: `[num_groups, group_size]`."""
        ...


@dataclass(frozen=True)
class GroupedLogNormal:
    """Length min(ceil(median * exp(group_sigma * z_group + sigma * z)), max_length): siblings have similar lengths."""

    median: float
    group_sigma: float
    sigma: float
    max_length: int

    @cached_property
    def distribution(self) -> LengthDistribution:
        return lognormal(self.median, math.hypot(self.group_sigma, self.sigma), self.max_length)

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int, group_size: int) -> Int64Array:
        exponents = self.group_sigma * rng.standard_normal((num_groups, 1))
        exponents = exponents + self.sigma * rng.standard_normal((num_groups, group_size))
        lengths = np.ceil(self.median * np.exp(exponents))
        return np.clip(lengths, 1, self.max_length).astype(np.int64)


@dataclass(frozen=True)
class CycledLengths:
    """Lengths in the order of a list, which is repeated: for traces worked out by hand."""

    lengths: Sequence[int]

    @cached_property
    def distribution(self) -> LengthDistribution:
        return from_counts(self.lengths)

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int, group_size: int) -> Int64Array:
        indices = np.arange(first_group * group_size, (first_group + num_groups) * group_size)
        return np.array(self.lengths, np.int64)[indices % len(self.lengths)].reshape(num_groups, group_size)
