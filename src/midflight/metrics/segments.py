"""Where a token stands: in which bucket of lags, in which tenth of its response, and what it may be compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midflight.types import BoolArray, Int32Array, Int64Array

LAG_EDGES = (0, 1, 2, 4, 8, 16, 32, 64)  # optimizer steps; the least lag in each bucket, of which the last is open
LAG_LABELS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")
NUM_POSITIONS = 10  # parts of a response


def lag_buckets(lags: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """The bucket of each lag: the last whose edge it reaches. Shapes: [M] -> [M]."""
    assert not len(lags) or lags.min() >= 0, "a token cannot be newer than the weights that train on it"
    return np.searchsorted(LAG_EDGES, lags, side="right") - 1


def tenths(lengths: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """floor(10 * index / length) of every token in responses that are laid end to end.

    Of a response of fewer than ten tokens some tenths have none.

    Shapes: lengths [S], in tokens -> [sum of lengths].
    """
    length_M = np.repeat(lengths, lengths)
    index_M = np.arange(len(length_M)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    position_M: Int64Array = index_M * NUM_POSITIONS // length_M
    return position_M


@dataclass(frozen=True, slots=True)
class TokenOrigins:
    """What is known of a microbatch's tokens before any forward pass; all [M], of those that carry loss."""

    lags: Int32Array  # optimizer steps
    positions: Int64Array  # tenth of its response, 0 to 9
    of_one_version: BoolArray  # the weights in training sampled it and every token before it
