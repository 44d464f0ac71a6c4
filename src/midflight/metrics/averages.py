"""Means over the metrics lines of a run."""

from __future__ import annotations

from collections.abc import Sequence

from midflight.metrics.jsonl import MetricsLine
from midflight.metrics.segments import LAG_EDGES


def mismatch_of(lines: Sequence[MetricsLine]) -> dict[str, float | None]:
    """Differences between trainer and engine log-probabilities at one version: mean over tokens and maximum (nats).

    Both are None if no step had a token to compare. The maximum is None if a difference was not finite.
    """
    compared = [line for line in lines if line.get("mismatch/tokens")]
    largest = [line["mismatch/max"] for line in compared]
    return {
        "mean": mean_over(compared, "mismatch/mean", weights="mismatch/tokens"),
        "max": None if not largest or None in largest else max(largest),
    }


def mean_by_lag(lines: Sequence[MetricsLine], key: str) -> list[float | None]:
    """Mean of `key/by_lag` over steps, weighted by tokens; None for a bucket without tokens."""
    return [
        mean_over(
            [
                {key: line[f"{key}/by_lag"][bucket], "tokens": line["lag/tokens_by_lag"][bucket]}
                for line in lines
                if f"{key}/by_lag" in line
            ],
            key,
            weights="tokens",
        )
        for bucket in range(len(LAG_EDGES))
    ]


def mean_over(lines: Sequence[MetricsLine], key: str, weights: str | None) -> float | None:
    """Mean of `key` over the lines that have it, weighted by `weights`; None if no line has it."""
    pairs = [(line[key], line[weights] if weights else 1.0) for line in lines if line.get(key) is not None]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None
