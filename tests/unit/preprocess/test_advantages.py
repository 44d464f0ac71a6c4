"""Advantages match hand-computed values, and equal rewards give exactly zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.preprocess import advantages
from midflight.preprocess.advantages import normalize

GROUP_BASELINES = ["group_mean", "group_mean_std", "leave_one_out"]


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("group_mean", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("group_mean_std", [1, 0, 0, 0], [0.75 / 0.4331127, *[-0.25 / 0.4331127] * 3]),
        ("leave_one_out", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("leave_one_out", [3, 1, -1], [3 - 0, 1 - 1, -1 - 2]),
        ("leave_one_out", [2, 5], [-3, 3]),
        ("no_baseline", [1, 0, 2], [1, 0, 2]),
        ("no_baseline", [-2], [-2]),
    ],
)
def test_advantages_match_hand_computed_values(name: str, rewards: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(
        getattr(advantages, name)(np.array(rewards, np.float64)), expected, rtol=1e-6, atol=1e-12
    )


@pytest.mark.parametrize("name", GROUP_BASELINES)
@given(reward=st.floats(-1e3, 1e3), size=st.integers(2, 64))
def test_equal_rewards_have_exactly_zero_advantage(name: str, reward: float, size: int) -> None:
    """Rounding must leave exact zeros, because trajectories with zero advantage are not packed."""
    assert getattr(advantages, name)(np.full(size, reward)).tolist() == [0.0] * size


def test_normalization_matches_hand_computed_values() -> None:
    """Mean 1, standard deviation sqrt((1 + 9 + 1 + 9) / 4) = sqrt(5)."""
    normalized = normalize(np.array([2.0, 4.0, 0.0, -2.0]))
    np.testing.assert_allclose(normalized, np.array([1, 3, -1, -3]) / (5**0.5 + 1e-4))


@pytest.mark.parametrize("advantages", [[0.0] * 8, [0.3] * 7, [0.0]])
def test_normalizing_equal_advantages_gives_zeros(advantages: list[float]) -> None:
    assert normalize(np.array(advantages)).tolist() == [0.0] * len(advantages)
