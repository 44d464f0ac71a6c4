"""How long responses are: distributions for the formulas, and draws for the simulator. Lengths are in tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

    @cached_property
    def _cumulative(self) -> Float64Array:
        return self.probabilities.cumsum()

    @property
    def _lengths(self) -> Float64Array:
        return np.arange(1.0, self.max + 1)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Int64Array:
        """Independent lengths, by inversion: one uniform number each."""
        uniform = rng.random(shape) * self._cumulative[-1]
        indices: Int64Array = np.searchsorted(self._cumulative, uniform, side="right").astype(np.int64)
        return 1 + indices


def uniform(max_length: int) -> LengthDistribution:
    """1 to `max_length`, all as likely. Raises: ScenarioError, as all of these, naming what cannot be."""
    _check_length("max", max_length)
    return LengthDistribution(np.full(max_length, 1.0 / max_length))


def constant(length: int) -> LengthDistribution:
    return of_counts({length: 1})


def two_point(short: int, long: int, long_share: float) -> LengthDistribution:
    """`long` with probability `long_share`, else `short`."""
    if not 0 <= long_share <= 1:
        raise ScenarioError(f"long_share = {long_share:g}: should be between 0 and 1")
    counts: dict[int, float] = {short: 1 - long_share}
    counts[long] = counts.get(long, 0.0) + long_share
    return of_counts(counts)


def lognormal(median: float, sigma: float, max_length: int) -> LengthDistribution:
    """min(ceil(median * exp(sigma * z)), max_length), z normal: a long tail, cut off where an engine cuts it off."""
    _check_length("max", max_length)
    if not 0 < median < math.inf:
        raise ScenarioError(f"median = {median:g}: should be greater than 0")
    if not 0 < sigma < math.inf:
        raise ScenarioError(f"sigma = {sigma:g}: should be greater than 0")
    normal = NormalDist(math.log(median), sigma)
    cumulative = np.array([0.0, *(normal.cdf(math.log(length)) for length in range(1, max_length)), 1.0])
    return LengthDistribution(np.diff(cumulative))


def of_counts(counts: Mapping[int, float]) -> LengthDistribution:
    """As often as they were seen, or any other weights."""
    kept = {length: count for length, count in counts.items() if count > 0}
    if not kept:
        raise ScenarioError("counts: there is no length")
    for length in kept:
        _check_length("lengths", length)
    if any(not 0 <= count < math.inf for count in counts.values()):
        raise ScenarioError("counts: should be at least 0 and finite")
    probabilities = np.zeros(max(kept))
    for length, count in kept.items():
        probabilities[length - 1] = count
    return LengthDistribution(probabilities / probabilities.sum())


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
class IndependentLengths:
    """Siblings are no more alike than strangers."""

    distribution: LengthDistribution

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int, group_size: int) -> Int64Array:
        return self.distribution.draw(rng, (num_groups, group_size))


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
        counts: dict[int, float] = {}
        for length in self.lengths:
            counts[length] = counts.get(length, 0) + 1
        return of_counts(counts)

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int, group_size: int) -> Int64Array:
        indices = np.arange(first_group * group_size, (first_group + num_groups) * group_size)
        return np.array(self.lengths, np.int64)[indices % len(self.lengths)].reshape(num_groups, group_size)


def _check_length(name: str, length: int) -> None:
    if length < 1:
        raise ScenarioError(f"{name}: a length should be at least 1, got {length}")
