"""Scores of the frozen reference, one group at a time.

The scores of a group depend on its tokens and rewards only. Any process may therefore compute them: before the group is
chosen for a batch, or again after a kill, with the same result.
"""

from __future__ import annotations

import hashlib

import numpy as np

from midflight.preprocess.batches import Preprocessing, may_have_gradient, sampled_mask
from midflight.preprocess.packing import collate, join
from midflight.protocols import Reference
from midflight.tracing.spans import Tracer
from midflight.types import (
    Float32Array,
    GeneratedTokens,
    GroupScores,
    GroupToScore,
    RolloutGroup,
    SequenceToScore,
    Trajectory,
)

_DIGEST_BYTES = 16


def group_to_score(group: RolloutGroup, preprocessing: Preprocessing) -> GroupToScore:
    """Return the rollouts that the reference scores: those that may carry a gradient."""
    return GroupToScore(
        group.group_id,
        [
            SequenceToScore(
                rollout.rollout_id,
                GeneratedTokens.joined([segment.tokens for segment in rollout.segments]).token_ids,
                sampled_mask(rollout),
            )
            for rollout in may_have_gradient(group, preprocessing)
        ],
    )


def digest_of(group: GroupToScore) -> bytes:
    """Return a digest of the rollouts and their tokens."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for sequence in group.sequences:
        digest.update(np.array([sequence.rollout_id, len(sequence.token_ids)], np.int64).tobytes())
        digest.update(sequence.token_ids.tobytes())
        digest.update(sequence.sampled.tobytes())
    return digest.digest()


class GroupScorer:
    """Scores groups with the reference; the rollouts of a group share their prompt in one forward pass."""

    def __init__(self, reference: Reference, max_tokens: int, tracer: Tracer) -> None:
        """`max_tokens`: largest forward pass (tokens); at least the longest sequence."""
        self._reference, self._max_tokens, self._tracer = reference, max_tokens, tracer

    def score(self, group: GroupToScore) -> GroupScores:
        """Score a group. Raises: an error of the reference."""
        with self._tracer.span("score", group=group.group_id):
            logprobs: dict[int, Float32Array] = {}
            trajectories = [_trajectory(sequence) for sequence in group.sequences]
            for members in collate([len(each.token_ids) for each in trajectories], self._max_tokens):
                microbatch = join([trajectories[member] for member in members])
                scored = self._reference.logprobs(microbatch)
                for member, (_, own) in zip(members, microbatch.sequence_positions(), strict=True):
                    logprobs[member] = scored[own][microbatch.loss_mask[own]]
            return GroupScores(group.group_id, digest_of(group), [logprobs[member] for member in sorted(logprobs)])


def _trajectory(sequence: SequenceToScore) -> Trajectory:
    """Trajectory for a forward pass that uses the tokens and the mask only."""
    zeros = np.zeros(len(sequence.token_ids), np.float32)
    return Trajectory(
        rollout_id=sequence.rollout_id,
        token_ids=sequence.token_ids,
        loss_mask=sequence.sampled,
        behavior_logprobs=zeros,
        weight_versions=np.zeros_like(sequence.token_ids),
        advantages=zeros,
        reward=0.0,
        first_version=0,
    )
