"""Advantages: one number per rollout, its reward relative to a baseline from its group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from midflight.types import Float64Array

# Maps the rewards of a group to its advantages. A custom function also gets `advantage.options` as keyword arguments.
Advantage = Callable[[Float64Array], Float64Array]

# Keeps the division finite if all rewards of a group are equal; the numerator is then zero.
_STD_EPSILON = 1e-4

# Advantages below this value are rounding errors of zero (standard deviations).
_ROUNDING = 1e-12


def group_mean(rewards: Float64Array) -> Float64Array:
    """r - mean(r) over the group. Source: Dr. GRPO (Liu et al. 2025)."""
    # Subtracting the first reward gives exact zeros for equal rewards: their mean may differ from them in the last bit.
    relative: Float64Array = rewards - rewards[0]
    return relative - np.mean(relative)


def group_mean_std(rewards: Float64Array) -> Float64Array:
    """(r - mean(r)) / (std(r) + 1e-4) over the group, population standard deviation.

    Source: GRPO (Shao et al. 2024).
    """
    return group_mean(rewards) / (np.std(rewards) + _STD_EPSILON)


def leave_one_out(rewards: Float64Array) -> Float64Array:
    """r - mean of the other rewards of the group: a baseline that does not depend on the rollout itself.

    Equal to n / (n - 1) times `group_mean`. Source: RLOO (Kool et al. 2019; Ahmadian et al. 2024).
    """
    return group_mean(rewards) * len(rewards) / (len(rewards) - 1)


def no_baseline(rewards: Float64Array) -> Float64Array:
    """Return the rewards unchanged."""
    return rewards


def normalize(advantages: Float64Array) -> Float64Array:
    """(A - mean(A)) / (std(A) + 1e-4) over the rollouts of a batch. Source: Magistral (2025), sec. 2.1."""
    normalized = group_mean_std(advantages)
    return np.where(np.abs(normalized) < _ROUNDING, 0.0, normalized)
