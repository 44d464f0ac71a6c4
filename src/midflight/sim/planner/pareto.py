"""The splits that no other beats in both lag and rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from midflight.types import Float64Array, Int64Array


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """Splits that no other beats in both lag and rate, slow ones first. Shapes: all [F].

    Of those with the same lag and rate, the one with the fewest in flight, then the fewest engines.
    """

    lags: Int64Array  # max_lag, optimizer steps, going up
    rates: Float64Array  # trained tokens per unit of time, going up
    num_in_flight: Int64Array
    num_engines: Int64Array

    def __len__(self) -> int:
        return len(self.lags)

    def up_to(self, max_lag: int | None) -> ParetoFront:
        """The splits of no more lag; all of them if that is None."""
        end = len(self) if max_lag is None else int(np.searchsorted(self.lags, max_lag, side="right"))
        return ParetoFront(self.lags[:end], self.rates[:end], self.num_in_flight[:end], self.num_engines[:end])


def front_of(splits: ParetoFront, scale: float) -> ParetoFront:
    """The front of any splits; rates are the same that differ by less than 12 digits of `scale`."""
    rounded = np.round(splits.rates / scale, 12)
    order = np.lexsort((splits.num_engines, splits.num_in_flight, -rounded, splits.lags))
    fastest_before = np.maximum.accumulate(np.concatenate([[-np.inf], rounded[order]]))[:-1]
    order = order[rounded[order] > fastest_before]
    return ParetoFront(splits.lags[order], splits.rates[order], splits.num_in_flight[order], splits.num_engines[order])
