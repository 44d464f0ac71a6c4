"""Origins of tokens: lags, tenths, and the check for a single version."""

from __future__ import annotations

import numpy as np

from midflight.preprocess.batches import trajectory_of
from midflight.preprocess.packing import pack
from midflight.trainer.inputs import token_origins
from midflight.types import GeneratedTokens, GroupId, Rollout, RolloutId, RolloutStatus, Segment, Trajectory


def trajectory(tokens: list[int], versions: list[int], carries_loss: list[bool]) -> Trajectory:
    """Trajectory of a rollout with the prompt (90, 91)."""
    generated = GeneratedTokens(
        np.array(tokens, np.int32), np.full(len(tokens), -1, np.float32), np.array(versions, np.int32)
    )
    prompt = np.array([90, 91], np.int32)
    rollout = Rollout(RolloutId(0), GroupId(0), RolloutStatus.FINISHED, [Segment.given(prompt), Segment(generated)])
    return trajectory_of(rollout, 1.0, 1.0, np.array(carries_loss))


def test_origins_cover_tokens_that_carry_loss() -> None:
    (microbatch,) = pack([trajectory([5, 6, 7, 8], [1, 3, 3, 7], [False, True, True, True])], max_tokens=100)
    origins = token_origins(microbatch, version=7)
    assert origins.lags.tolist() == [4, 4, 0]
    assert origins.positions.tolist() == [0, 3, 6]
    assert origins.of_one_version.tolist() == [False] * 3


def test_first_generated_token_decides_if_a_sequence_has_one_version() -> None:
    batch = [
        trajectory([1, 2], [7, 7], [True, True]),
        trajectory([3, 4, 5], [6, 7, 7], [True, True, True]),
        trajectory([6], [7], [True]),
    ]
    (microbatch,) = pack(batch, max_tokens=100)
    assert microbatch.sequence_lengths.tolist() == [5, 2, 1], "longest first, with a shared prompt"
    assert token_origins(microbatch, version=7).of_one_version.tolist() == [False] * 3 + [True] * 3


def test_older_token_without_loss_in_a_shared_prefix_counts() -> None:
    """Both begin with the same sampled token of version 0, which is also the version of prompt tokens."""
    batch = [trajectory([5, 6, 8], [0, 7, 7], [False, True, True]), trajectory([5, 7], [0, 7], [False, True])]
    (microbatch,) = pack(batch, max_tokens=100)
    assert microbatch.prefix_lengths.tolist() == [0, 3]
    origins = token_origins(microbatch, version=7)
    assert origins.lags.tolist() == [0, 0, 0]
    assert origins.of_one_version.tolist() == [False] * 3


def test_first_step_has_one_version() -> None:
    (microbatch,) = pack([trajectory([5, 6], [0, 0], [True, True])], max_tokens=100)
    assert token_origins(microbatch, version=0).of_one_version.tolist() == [True, True]
