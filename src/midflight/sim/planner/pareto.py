"""The splits that no other beats in both lag and rate, found a chunk of all splits at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from midflight.types import BoolArray, Float64Array, Int64Array

_DIGITS = 12  # rates that agree so far are the same, and only rounded differently


@dataclass(frozen=True, slots=True)
class Front:
    """Splits that no other beats in both lag and rate, slow ones first. Shapes: all [F].

    Of those with the same lag and rate, the one with the fewest in flight, then the fewest engines.
    """

    lags: Int64Array  # max_lag, optimizer steps, going up
    rates: Float64Array  # trained tokens per unit of time, going up
    num_in_flight: Int64Array
    num_engines: Int64Array

    def __len__(self) -> int:
        return len(self.lags)

    def up_to(self, max_lag: int) -> Front:
        end = int(np.searchsorted(self.lags, max_lag, side="right"))
        return Front(self.lags[:end], self.rates[:end], self.num_in_flight[:end], self.num_engines[:end])


class FrontBuilder:
    """Memory grows with the lag of the fastest split, not with the number of splits."""

    def __init__(self, scale: float) -> None:
        """`scale`: a rate about as high as they get."""
        self._scale = scale
        self._best = np.full(1, -math.inf)  # highest rate so far at each lag or a lower one
        self._fastest = -math.inf
        self._lag_of_fastest = 0
        self._kept: list[tuple[Front, Float64Array]] = []  # and their rates, rounded

    def add(self, num_engines: Int64Array, lags: Int64Array, rates: Float64Array, possible: BoolArray) -> None:
        """Splits with 1, 2, ... in flight on so many engines. Shapes: num_engines [I], the others [I, H]."""
        if not possible.any():
            return
        rounded = np.where(possible, np.round(rates / self._scale, _DIGITS), -math.inf)
        self._note_fastest(lags, rounded)
        # What has more lag than the fastest is of no use, and lags beyond that need not be known.
        candidates = possible & (lags <= self._lag_of_fastest)
        if len(self._best) <= self._lag_of_fastest:
            self._best = np.pad(self._best, (0, self._lag_of_fastest + 1 - len(self._best)), mode="edge")
        np.maximum.at(self._best, lags[candidates], rounded[candidates])
        self._best = np.maximum.accumulate(self._best)
        with_less = np.concatenate([[-math.inf], self._best])
        lag = np.where(candidates, lags, 0)
        found = np.nonzero(candidates & (rounded >= self._best[lag]) & (rounded > with_less[lag]))
        rows, columns = found
        self._kept.append((Front(lags[found], rates[found], columns + 1, num_engines[rows]), rounded[found]))

    def front(self) -> Front:
        """Of all that were added; empty if none was possible."""
        if not self._kept:
            nothing = np.zeros(0, np.int64)
            return Front(nothing, np.zeros(0), nothing, nothing)
        fronts = [front for front, _ in self._kept]
        rounded = np.concatenate([rates for _, rates in self._kept])
        lags = np.concatenate([front.lags for front in fronts])
        rates = np.concatenate([front.rates for front in fronts])
        in_flight = np.concatenate([front.num_in_flight for front in fronts])
        engines = np.concatenate([front.num_engines for front in fronts])
        order = np.lexsort((engines, in_flight, -rounded, lags))
        before = np.maximum.accumulate(np.concatenate([[-math.inf], rounded[order]]))[:-1]
        order = order[rounded[order] > before]
        return Front(lags[order], rates[order], in_flight[order], engines[order])

    def _note_fastest(self, lags: Int64Array, rounded: Float64Array) -> None:
        fastest = float(rounded.max())
        if fastest < self._fastest:
            return
        lag = int(lags[rounded == fastest].min())
        self._lag_of_fastest = lag if fastest > self._fastest else min(lag, self._lag_of_fastest)
        self._fastest = fastest
