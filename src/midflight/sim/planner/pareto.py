"""Pareto front of the splits: lag against rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from midflight.types import Float64Array, Int64Array


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """Splits that no other split beats in both lag and rate, slow ones first. Shapes: all [F].

    Ties in lag and rate: the split with the fewest sequences in flight, then with the fewest engines.
    """

    lags: Int64Array  # max_lag in optimizer steps, increasing
    rates: Float64Array  # trained tokens per unit of time, increasing
    num_in_flight: Int64Array
    num_engines: Int64Array

    def __len__(self) -> int:
        return len(self.lags)

    def up_to(self, max_lag: int | None) -> ParetoFront:
        """Return the splits with a lag of at most `max_lag`; all splits if it is None."""
        end = len(self) if max_lag is None else int(np.searchsorted(self.lags, max_lag, side="right"))
        return ParetoFront(self.lags[:end], self.rates[:end], self.num_in_flight[:end], self.num_engines[:end])


def front_of(splits: ParetoFront, scale: float) -> ParetoFront:
    """Return the front of any splits; rates are equal if they agree in 12 decimal places of rate / `scale`."""
    rounded = np.round(splits.rates / scale, 12)
    order = np.lexsort((splits.num_engines, splits.num_in_flight, -rounded, splits.lags))
    fastest_before = np.maximum.accumulate(np.concatenate([[-np.inf], rounded[order]]))[:-1]
    order = order[rounded[order] > fastest_before]
    return ParetoFront(splits.lags[order], splits.rates[order], splits.num_in_flight[order], splits.num_engines[order])
