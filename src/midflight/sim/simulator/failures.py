"""Engine failures: when each starts and when the engine is back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Failure(NamedTuple):
    start: float
    end: float


class Failures:
    """Random failures: exponential time to the next failure, fixed time to repair; none if the mean time is None.

    The failures of one engine depend only on the seed and the engine's index.
    """

    def __init__(self, mean_time_between: float | None = None, repair_time: float = 0.0, seed: int = 0) -> None:
        self._mean_time_between, self._repair_time, self._seed = mean_time_between, repair_time, seed
        self._rngs: dict[int, np.random.Generator] = {}

    def next(self, engine: int, after: float) -> Failure | None:
        """Return the first failure of `engine` from `after` on; None if engines never fail. Call in order of time."""
        if self._mean_time_between is None:
            return None
        rng = self._rngs.setdefault(engine, np.random.default_rng((self._seed, engine)))
        start = after + float(rng.exponential(self._mean_time_between))
        return Failure(start, start + self._repair_time)


NO_FAILURES = Failures()
