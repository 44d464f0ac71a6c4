"""Length bias: trained against generated response lengths, from histograms {response length: rollouts}.

Units: lengths are in tokens.
"""

from __future__ import annotations

from typing import Any

from midflight.metrics.lag import Histogram


def length_ks(generated: Histogram, trained: Histogram) -> float | None:
    """Kolmogorov-Smirnov distance of two samples of lengths: the largest difference of their distributions, in [0, 1].

    None if a sample is empty. Rollouts that still wait for training are in the generated sample only, so a distance of
    about their share is no bias.
    """
    num_generated, num_trained = sum(generated.values()), sum(trained.values())
    if not num_generated or not num_trained:
        return None
    distance = below_generated = below_trained = 0.0
    for length in sorted({*generated, *trained}):
        below_generated += generated.get(length, 0) / num_generated
        below_trained += trained.get(length, 0) / num_trained
        distance = max(distance, abs(below_generated - below_trained))
    return distance


def length_bias(generated: Histogram, trained: Histogram, dropped: Histogram) -> dict[str, Any]:
    """Kolmogorov-Smirnov distance, and the mean lengths of generated, trained and dropped responses."""
    return {
        "ks": length_ks(generated, trained),
        "mean_generated": _mean(generated),
        "mean_trained": _mean(trained),
        "mean_dropped": _mean(dropped),
        "dropped_rollouts": sum(dropped.values()),
    }


def _mean(histogram: Histogram) -> float | None:
    count = sum(histogram.values())
    return sum(length * number for length, number in histogram.items()) / count if count else None
