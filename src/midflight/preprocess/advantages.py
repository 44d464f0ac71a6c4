"""How much better than expected a rollout was: one number per rollout, from the rewards of its group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from midflight.types import Float64Array

# Keeps the division finite where all rewards of a group are equal; the numerator is zero there.
_STD_EPSILON = 1e-4


def group_mean(rewards: Float64Array) -> Float64Array:
    """r - mean(r) over the group. Source: Dr. GRPO (Liu et al. 2025)."""
    return rewards - np.mean(rewards)


def group_mean_std(rewards: Float64Array) -> Float64Array:
    """(r - mean(r)) / (std(r) + 1e-4) over the group, population standard deviation.

    Source: GRPO (Shao et al. 2024).
    """
    return group_mean(rewards) / (np.std(rewards) + _STD_EPSILON)


def no_baseline(rewards: Float64Array) -> Float64Array:
    """The rewards themselves."""
    return rewards


ADVANTAGES: dict[str, Callable[[Float64Array], Float64Array]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "none": no_baseline,
}
