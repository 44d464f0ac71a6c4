"""Segments of tokens: the bucket of their lag, the tenth of their response, and the check for a single version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midflight.types import BoolArray, Int32Array, Int64Array

LAG_EDGES = (0, 1, 2, 4, 8, 16, 32, 64)  # smallest lag in each bucket (optimizer steps); the last bucket is open
LAG_LABELS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")
NUM_POSITIONS = 10  # parts of a response


def lag_buckets(lags: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Index of the last bucket whose edge each lag reaches. Shapes: [M] -> [M]."""
    assert not len(lags) or lags.min() >= 0, "a token cannot be newer than the weights that train on it"
    return np.searchsorted(LAG_EDGES, lags, side="right") - 1


def tenths(lengths: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """floor(10 * index / length) for every token of concatenated responses.

    In a response of fewer than ten tokens, some tenths are empty.

    Shapes: lengths [S], in tokens -> [sum of lengths].
    """
    length_M = np.repeat(lengths, lengths)
    index_M = np.arange(len(length_M)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    position_M: Int64Array = index_M * NUM_POSITIONS // length_M
    return position_M


@dataclass(frozen=True, slots=True)
class TokenOrigins:
    """Facts about a microbatch's tokens that need no forward pass; all [M], for tokens that carry loss."""

    lags: Int32Array  # optimizer steps
    positions: Int64Array  # tenth of the response, 0 to 9
    of_one_version: BoolArray  # True if the weights in training sampled the token and all tokens before it
