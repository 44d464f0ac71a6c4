"""Lag metrics: the age of tokens when they are trained on, from a histogram {token_lag: number of tokens}.

Units: lag is in optimizer steps, the trainer's version minus the version that sampled the token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

Histogram = Mapping[int, int]


def lag_metrics(histogram: Histogram) -> dict[str, float]:
    """`lag/mean`, `lag/max`, `lag/p95` and `old_token_fraction`; {} if there are no tokens."""
    num_tokens = sum(histogram.values())
    if not num_tokens:
        return {}
    return {
        "lag/mean": sum(lag * count for lag, count in histogram.items()) / num_tokens,
        "lag/max": float(lag_percentile(histogram, 100)),
        "lag/p95": float(lag_percentile(histogram, 95)),
        "old_token_fraction": old_token_fraction(histogram),
    }


def lag_percentile(histogram: Histogram, percent: int) -> int:
    """Smallest lag that at least `percent` % of the tokens do not exceed (nearest rank, no interpolation).

    Raises: ValueError if there are no tokens.
    """
    needed = percent * _num_tokens(histogram)
    seen = 0
    for lag in sorted(lag for lag, count in histogram.items() if count):
        seen += histogram[lag]
        if 100 * seen >= needed:
            return lag
    raise ValueError(f"{percent} is not a percentage")


def old_token_fraction(histogram: Histogram) -> float:
    """Share of the tokens with a lag of 1 or more: older weights sampled them than the weights in training.

    Raises: ValueError if there are no tokens.
    """
    return sum(count for lag, count in histogram.items() if lag >= 1) / _num_tokens(histogram)


def merge_histograms(histograms: Iterable[Histogram]) -> dict[int, int]:
    """Add up histograms; the keys of the result are sorted."""
    merged: Counter[int] = Counter()
    for histogram in histograms:
        merged.update(histogram)
    return dict(sorted(merged.items()))


def _num_tokens(histogram: Histogram) -> int:
    num_tokens = sum(histogram.values())
    if not num_tokens:
        raise ValueError("no tokens to measure")
    assert min(histogram) >= 0, "a token cannot be newer than the weights that train on it"
    return num_tokens
