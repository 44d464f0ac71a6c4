"""Token weights under each denominator match hand-computed values."""

from __future__ import annotations

import pytest
import torch

from midflight.losses.denominators import BatchCounts, token_weights

# The batch has 4 sequences with 10 tokens in all, and at most 8 tokens per response. This microbatch has two sequences,
# of 2 and 3 tokens, with a sequence without loss tokens between them.
COUNTS = BatchCounts(num_tokens=10, num_sequences=4, max_response_tokens=8)
SEQUENCE_INDEX = torch.tensor([0, 0, 2, 2, 2])


@pytest.mark.parametrize(
    ("denominator", "expected"),
    [
        ("tokens", [1 / 10] * 5),
        ("sequences", [1 / 4] * 5),
        ("sequence_mean", [1 / (2 * 4)] * 2 + [1 / (3 * 4)] * 3),
        ("constant", [1 / (4 * 8)] * 5),
    ],
)
def test_weights_match_hand_computed_values(denominator: str, expected: list[float]) -> None:
    weights = token_weights(denominator, COUNTS, SEQUENCE_INDEX, num_sequences=3)
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("denominator", ["tokens", "sequences", "sequence_mean", "constant"])
def test_no_tokens_give_no_weights(denominator: str) -> None:
    counts = BatchCounts(num_tokens=0, num_sequences=2, max_response_tokens=8)
    assert token_weights(denominator, counts, torch.zeros(0, dtype=torch.int64), num_sequences=0).shape == (0,)
