"""The penalty for responses that are nearly too long, at the corners of its curve."""

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
        # DAPO's own: 16384 tokens are free, the next 4096 are not.
        (20480, 4096, [16384, 17408, 20480], [0, -0.25, -1]),
    ],
)
def test_by_hand(max_tokens: int, buffer: int, lengths: list[int], expected: list[float]) -> None:
    penalties = overlong_penalty(np.array(lengths, np.int32), max_tokens, buffer)
    np.testing.assert_allclose(penalties, expected, atol=1e-12)
