"""When engines fail, and when they are back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Failure(NamedTuple):
    start: float
    end: float


class Failures(Protocol):
    def next(self, engine: int, after: float) -> Failure | None:
        """The first of this engine that starts at `after` or later; asked in order."""
        ...


@dataclass(frozen=True)
class ListedFailures:
    """(engine, start, end) of each."""

    failures: Sequence[tuple[int, float, float]]

    def next(self, engine: int, after: float) -> Failure | None:
        own = [Failure(start, end) for index, start, end in self.failures if index == engine and start >= after]
        return min(own, default=None)


class RandomFailures:
    """An engine works for an exponential time, and is away for a fixed one. What one does depends on its seed alone."""

    def __init__(self, mean_time_between: float, repair_time: float, seed: int) -> None:
        self._mean_time_between, self._repair_time, self._seed = mean_time_between, repair_time, seed
        self._rngs: dict[int, np.random.Generator] = {}

    def next(self, engine: int, after: float) -> Failure:
        rng = self._rngs.setdefault(engine, np.random.default_rng((self._seed, engine)))
        start = after + float(rng.exponential(self._mean_time_between))
        return Failure(start, start + self._repair_time)


NO_FAILURES = ListedFailures(())
