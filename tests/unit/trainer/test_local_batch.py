"""Local batches: the microbatches of each rank, and its dummy microbatches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from midflight.trainer.local_batch import LocalBatch, local_batch_of
from midflight.types import Microbatch

from .test_loop import batch


def microbatch(num_tokens: int) -> Microbatch:
    """Microbatch that its length identifies."""
    ((original,),) = batch(0, 1.0).microbatches
    return replace(original, token_ids=np.zeros(num_tokens, np.int32))


def lengths(local: LocalBatch) -> tuple[list[int], list[int]]:
    return (
        [len(microbatch.token_ids) for microbatch in local.microbatches],
        [len(microbatch.token_ids) for microbatch in local.dummy_microbatches],
    )


@pytest.mark.parametrize(
    ("packed_for", "expected"),
    [
        ([[5, 3], [4, 6]], [([5, 3], []), ([4, 6], [])]),
        ([[5, 3, 7], [4]], [([5, 3, 7], []), ([4], [3, 3])]),
        ([[], [4, 6]], [([], [4, 4]), ([4, 6], [])]),
        ([[], []], [([], []), ([], [])]),
        ([[5, 3, 7]], [([5, 7], []), ([3], [3])]),
        ([[5], [3, 7], [2]], [([5, 7], []), ([3, 2], [])]),
    ],
    ids=["equal", "unequal", "one empty", "both empty", "packed for one rank", "packed for three"],
)
def test_all_ranks_do_equally_many_passes(
    packed_for: list[list[int]], expected: list[tuple[list[int], list[int]]]
) -> None:
    microbatches = [[microbatch(num_tokens) for num_tokens in local] for local in packed_for]
    packed = replace(batch(0, 1.0), microbatches=microbatches)
    assert [lengths(local_batch_of(packed, rank, 2)) for rank in range(2)] == expected
