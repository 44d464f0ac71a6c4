"""What each rank does of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from midflight.trainer.local_batch import LocalBatch, local_batch_of
from midflight.types import Microbatch

from .test_loop import batch


def microbatch(num_tokens: int) -> Microbatch:
    """Told from others by its length."""
    ((made,),) = batch(0, 1.0).microbatches
    return replace(made, token_ids=np.zeros(num_tokens, np.int32))


def lengths(local: LocalBatch) -> tuple[list[int], list[int]]:
    return [len(each.token_ids) for each in local.microbatches], [
        len(each.token_ids) for each in local.dummy_microbatches
    ]


@pytest.mark.parametrize(
    ("made_for", "expected"),
    [
        ([[5, 3], [4, 6]], [([5, 3], []), ([4, 6], [])]),
        ([[5, 3, 7], [4]], [([5, 3, 7], []), ([4], [3, 3])]),
        ([[], [4, 6]], [([], [4, 4]), ([4, 6], [])]),
        ([[], []], [([], []), ([], [])]),
        ([[5, 3, 7]], [([5, 7], []), ([3], [3])]),
        ([[5], [3, 7], [2]], [([5, 7], []), ([3, 2], [])]),
    ],
    ids=["equal", "unequal", "one empty", "both empty", "made for one rank", "made for three"],
)
def test_all_ranks_do_as_many_passes(made_for: list[list[int]], expected: list[tuple[list[int], list[int]]]) -> None:
    shared = replace(batch(0, 1.0), microbatches=[[microbatch(each) for each in local] for local in made_for])
    assert [lengths(local_batch_of(shared, rank, 2)) for rank in range(2)] == expected
