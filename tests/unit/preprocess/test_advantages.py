from __future__ import annotations

import numpy as np
import pytest

from midflight.preprocess.advantages import ADVANTAGES


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("group_mean", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("group_mean_std", [1, 0, 0, 0], [0.75 / 0.4331127, *[-0.25 / 0.4331127] * 3]),
        ("group_mean_std", [1, 1, 1], [0, 0, 0]),
        ("none", [1, 0, 2], [1, 0, 2]),
    ],
)
def test_by_hand(name: str, rewards: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(ADVANTAGES[name](np.array(rewards, np.float64)), expected, rtol=1e-6, atol=1e-12)
