"""What a turn of the rollout loop costs, from the spans of real runs: t(h) of h sequences in flight.

A turn is everything between the starts of two decode steps: the step, which also prefills what was just admitted,
exchanging responses for grades, saving. Adopting weights and making batches are costs of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from midflight.errors import BenchmarkError
from midflight.tracing.spans import SpanRecord
from midflight.types import Float64Array

_COUNTED_ELSEWHERE = ("update", "preprocess")
_IDLE = ("wait", "grade")
_MIN_TURNS = 20  # near one size, for its time to be fitted


@dataclass(frozen=True, slots=True)
class Turn:
    rows: int  # sequences in flight
    seconds: float
    num_new: int = 0  # more sequences than in the turn before


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """U at each size, as a RateTable wants it: tokens per second of one engine, and how often a size was seen."""

    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    num_turns: tuple[int, ...]


def turns_of(spans: Sequence[SpanRecord]) -> list[Turn]:
    """All turns but the last, from the spans of a rollout process in order.

    One that ends in waiting has no more than its decode step.
    """
    turns: list[Turn] = []
    rows_before = 0
    decodes = [index for index, span in enumerate(spans) if span[0] == "decode"]
    for index, following in itertools.pairwise(decodes):
        _, start, end, arguments = spans[index]
        between = spans[index + 1 : following]
        if not any(span[0] in _IDLE for span in between):
            end = spans[following][1] - sum(span[2] - span[1] for span in between if span[0] in _COUNTED_ELSEWHERE)
        rows = arguments["rows"]
        if rows:  # else an update went on in a step that sampled nothing
            turns.append(Turn(rows, (end - start) / 1e9, max(0, rows - rows_before)))
        rows_before = rows
    return turns


def rows_per_token(spans: Sequence[SpanRecord], num_tokens: int) -> float:
    """How many rows it took to sample a token, over a whole run: a row whose prompt is being read samples none."""
    num_rows: int = sum(span[3]["rows"] for span in spans if span[0] == "decode")
    return max(1.0, num_rows / max(num_tokens, 1))


def fit_table(turns: Sequence[Turn], mean_length: float | None = None) -> DecodeTable:
    """t(h), linear between powers of two, by least squares; the sum of all turns is kept.

    With `mean_length`, the mean tokens of a response, what admitting sequences takes is fitted as well and spread
    over all of their tokens: else a phase that begins with all of them would make full batches look slow.
    A table's times and rates must not go down from one size to the next. Where noise makes them, the larger size
    takes the smaller one's.
    Raises: BenchmarkError if there are too few turns.
    """
    rows = np.array([turn.rows for turn in turns], np.float64)
    seconds = np.array([turn.seconds for turn in turns])
    sizes = _sizes(rows)
    if not len(sizes):
        raise BenchmarkError(f"the run took only {len(turns)} decode steps, which is not enough to measure them")
    columns = _hats(rows, sizes)
    if mean_length is None:
        times, *_ = np.linalg.lstsq(columns, seconds, rcond=None)
    else:
        num_new = np.array([turn.num_new for turn in turns], np.float64)
        fitted, *_ = np.linalg.lstsq(np.column_stack([columns, num_new]), seconds, rcond=None)
        times = fitted[:-1] + max(0.0, fitted[-1]) / mean_length * sizes
    times = np.maximum.accumulate(times)
    rates = np.maximum.accumulate(sizes / times)
    return DecodeTable(
        tuple(sizes.astype(int).tolist()),
        tuple(round(rate, 1) for rate in rates.tolist()),
        tuple(columns.sum(axis=0).round().astype(int).tolist()),
    )


def _sizes(rows: Float64Array) -> Float64Array:
    """Powers of two up to the most rows, and those themselves, that enough turns are near to."""
    if not len(rows):
        return rows
    largest = int(rows.max())
    sizes = np.array(sorted({largest, *(1 << power for power in range(largest.bit_length()))}), np.float64)
    while len(sizes) and (counts := _hats(rows, sizes).sum(axis=0)).min() < _MIN_TURNS:
        sizes = np.delete(sizes, counts.argmin())
    return sizes


def _hats(rows: Float64Array, sizes: Float64Array) -> Float64Array:
    """Shapes: `[turns, sizes]`: how much of each turn belongs to each size; rows add up to 1."""
    return np.column_stack([np.interp(rows, sizes, unit) for unit in np.eye(len(sizes))])
