"""The penalty for nearly too long responses matches hand-computed values."""

from __future__ import annotations

import numpy as np
import pytest

from midflight.preprocess.rewards import overlong_penalty


@pytest.mark.parametrize(
    ("max_tokens", "buffer", "lengths", "expected"),
    [
        (100, 20, [0, 79, 80, 81, 90, 99, 100], [0, 0, 0, -0.05, -0.5, -0.95, -1]),
        (100, 1, [98, 99, 100], [0, 0, -1]),
        (100, 0, [0, 99, 100], [0, 0, 0]),
        # DAPO's settings: no penalty up to 16384 tokens, then a buffer of 4096.
        (20480, 4096, [16384, 17408, 20480], [0, -0.25, -1]),
    ],
)
def test_penalty_matches_hand_computed_values(
    max_tokens: int, buffer: int, lengths: list[int], expected: list[float]
) -> None:
    penalties = overlong_penalty(np.array(lengths, np.int32), max_tokens, buffer)
    np.testing.assert_allclose(penalties, expected, atol=1e-12)
