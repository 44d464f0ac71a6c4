"""How long responses are: distributions for the formulas, and draws for the simulator. Lengths are in tokens."""

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
    """Lengths 1, 2, ... `max` and how likely each is.

    Shapes: probabilities [max], of lengths 1 to max, which add up to 1; the last is above 0.
    """

    probabilities: Float64Array

    @property
    def max(self) -> int:
        """L."""
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
        """P(length >= l) for l = 1 ... max, `[max]`: the share of a batch that is still going at its l-th token."""
        survival: Float64Array = np.minimum(self.probabilities[::-1].cumsum()[::-1], 1.0)
        return survival

    @property
    def distribution(self) -> LengthDistribution:
        return self

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int, group_size: int) -> Int64Array:
        """Independent lengths, by inversion: one uniform number each; siblings are no more alike than strangers."""
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
    """1 to `max_length`, all as likely."""
    return LengthDistribution(np.full(max_length, 1.0 / max_length))


def constant(length: int) -> LengthDistribution:
    return of_counts([length])


def two_point(short: int, long: int, long_share: float) -> LengthDistribution:
    """`long` with probability `long_share`, else `short`."""
    return of_counts([short, long], [1 - long_share, long_share])


def lognormal(median: float, sigma: float, max_length: int) -> LengthDistribution:
    """min(ceil(median * exp(sigma * z)), max_length), z normal: a long tail, cut off where an engine cuts it off."""
    normal = NormalDist(math.log(median), sigma)
    cumulative = np.array([0.0, *(normal.cdf(math.log(length)) for length in range(1, max_length)), 1.0])
    return LengthDistribution(np.diff(cumulative))


def of_counts(lengths: Sequence[int], counts: Sequence[float] | None = None) -> LengthDistribution:
    """As often as they were seen, or any other weights; default: once each.

    Raises: ScenarioError if none was ever seen.
    """
    weights = np.trim_zeros(np.bincount(np.array(lengths, np.int64), counts), "b")[1:]
    if not len(weights):
        raise ScenarioError("counts: there is no length")
    return LengthDistribution(weights / weights.sum())


class Lengths(Protocol):
    """Where the simulator's rollouts get their lengths from."""

    @property
    def distribution(self) -> LengthDistribution:
        """Of one rollout, whatever its siblings are."""
        ...

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int, group_size: int) -> Int64Array:
        """Lengths of the groups from `first_group` on, `[num_groups, group_size]`."""
        ...


@dataclass(frozen=True)
class GroupedLogNormal:
    """min(ceil(median * exp(group_sigma * z_group + sigma * z)), max_length): hard problems have long answers."""

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
    """One after another in the order of the list, again from its start at its end: for traces worked out by hand."""

    lengths: Sequence[int]

    @cached_property
    def distribution(self) -> LengthDistribution:
        return of_counts(self.lengths)

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int, group_size: int) -> Int64Array:
        indices = np.arange(first_group * group_size, (first_group + num_groups) * group_size)
        return np.array(self.lengths, np.int64)[indices % len(self.lengths)].reshape(num_groups, group_size)
