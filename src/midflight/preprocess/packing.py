"""Greedy collation: sequences, longest first, each into the first microbatch with room. Source: Magistral, sec. 3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from midflight.types import Microbatch, Trajectory


def collate(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Which sequences go together: lists of indices into `lengths`, each at most `max_tokens` in sum.

    Ties keep their order, so the packing is a function of the lengths alone.
    Raises: ValueError if one sequence alone is longer than max_tokens.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > max_tokens:
            raise ValueError(f"a sequence of {length} tokens does not fit into a microbatch of {max_tokens}")
        target = next((number for number, left in enumerate(room) if left >= length), None)
        if target is None:
            target = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[target].append(index)
        room[target] -= length
    return bins


def pack(trajectories: Sequence[Trajectory], max_tokens: int) -> list[Microbatch]:
    """Every trajectory in exactly one microbatch of at most `max_tokens` tokens."""
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    return [_join([trajectories[index] for index in members]) for members in collate(lengths, max_tokens)]


def _join(trajectories: Sequence[Trajectory]) -> Microbatch:
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    return Microbatch(
        token_ids=np.concatenate([trajectory.token_ids for trajectory in trajectories]),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        sequence_lengths=np.array(lengths, np.int32),
        loss_mask=np.concatenate([trajectory.loss_mask for trajectory in trajectories]),
        behavior_logprobs=np.concatenate([trajectory.behavior_logprobs for trajectory in trajectories]),
        weight_versions=np.concatenate([trajectory.weight_versions for trajectory in trajectories]),
        advantages=np.concatenate([trajectory.advantages for trajectory in trajectories]),
    )
