"""Greedy collation: sequences, longest first, each into the first microbatch with room. Source: Magistral, sec. 3.

Within a microbatch the rollouts of a group share their prompt: it is computed once, and gradients flow into it from
all of them, which is exactly what separate copies would add up to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from midflight.types import Microbatch, Trajectory

Scalar = TypeVar("Scalar", bound=np.generic)


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


def assign_to_ranks(num_trajectories: int, num_ranks: int, index: int) -> list[list[int]]:
    """Which trajectories of batch `index` each data-parallel rank gets: equal shares of a permutation.

    The permutation is known before the first of them is generated, so that nothing about a response, its length least
    of all, decides where it goes. Within a rank they keep their order.

    Raises: ValueError if the shares cannot be equal.
    Source: Magistral (2025), sec. 3.
    """
    if num_trajectories % num_ranks:
        raise ValueError(f"{num_trajectories} rollouts cannot be shared equally by {num_ranks} ranks")
    permutation = np.random.default_rng(index).permutation(num_trajectories)
    return [sorted(share.tolist()) for share in permutation.reshape(num_ranks, -1)]


def pack(trajectories: Sequence[Trajectory], max_tokens: int) -> list[Microbatch]:
    """Every trajectory in exactly one microbatch of at most `max_tokens` tokens, shared prompts stored once."""
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    return [_join([trajectories[index] for index in members]) for members in collate(lengths, max_tokens)]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A trajectory in a microbatch: what it shares, and from which of its tokens on it has its own."""

    trajectory: Trajectory
    prefix_start: int
    prefix_length: int

    def own(self, values: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        return values[self.prefix_length :]


def _join(trajectories: Sequence[Trajectory]) -> Microbatch:
    placed = _place(trajectories)
    lengths = [len(each.own(each.trajectory.token_ids)) for each in placed]
    return Microbatch(
        token_ids=np.concatenate([each.own(each.trajectory.token_ids) for each in placed]),
        position_ids=np.concatenate(
            [each.own(np.arange(len(each.trajectory.token_ids), dtype=np.int32)) for each in placed]
        ),
        loss_mask=np.concatenate([each.own(each.trajectory.loss_mask) for each in placed]),
        behavior_logprobs=np.concatenate([each.own(each.trajectory.behavior_logprobs) for each in placed]),
        weight_versions=np.concatenate([each.own(each.trajectory.weight_versions) for each in placed]),
        advantages=np.concatenate([each.own(each.trajectory.advantages) for each in placed]),
        ref_logprobs=None,
        sequence_lengths=np.array(lengths, np.int32),
        prefix_starts=np.array([each.prefix_start for each in placed], np.int32),
        prefix_lengths=np.array([each.prefix_length for each in placed], np.int32),
        rewards=np.array([each.trajectory.reward for each in placed], np.float32),
        first_versions=np.array([each.trajectory.first_version for each in placed], np.int32),
    )


def _place(trajectories: Sequence[Trajectory]) -> list[_Placed]:
    """Lay out in order; a prompt that stands there already is shared. It is all before the first sampled token."""
    placed: list[_Placed] = []
    prompt_starts: dict[bytes, int] = {}
    end = 0
    for trajectory in trajectories:
        prompt = trajectory.token_ids[: int(trajectory.loss_mask.argmax())]
        key = prompt.tobytes()
        if key in prompt_starts:
            each = _Placed(trajectory, prompt_starts[key], len(prompt))
        else:
            prompt_starts[key] = end
            each = _Placed(trajectory, 0, 0)
        placed.append(each)
        end += len(each.own(trajectory.token_ids))
    return placed
