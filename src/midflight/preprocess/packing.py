"""Greedy collation: sequences, longest first, each into the first microbatch with room. Source: Magistral, sec. 3.

Within a microbatch the rollouts of a group share one copy of their prompt. The prompt is computed once and receives
gradients from all rollouts, which equals the sum of the gradients of separate copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from midflight.types import Float32Array, Microbatch, Trajectory

Scalar = TypeVar("Scalar", bound=np.generic)


def collate(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group sequences into lists of indices into `lengths`; the lengths of a list add up to at most `max_tokens`.

    Sequences of equal length keep their order, so the packing depends on the lengths alone.
    Raises: ValueError if one sequence alone is longer than max_tokens.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > max_tokens:
            raise ValueError(f"a sequence of {length} tokens does not fit into a microbatch of {max_tokens} tokens")
        target = next((number for number, left in enumerate(room) if left >= length), None)
        if target is None:
            target = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[target].append(index)
        room[target] -= length
    return bins


def assign_to_ranks(num_trajectories: int, num_ranks: int, index: int) -> list[list[int]]:
    """Assign the trajectories of batch `index` to data-parallel ranks: equal parts of a random permutation.

    The permutation is known before generation begins, so no property of a response, its length in particular, can
    influence the assignment. Within a rank the trajectories keep their order.

    Returns: the indices of the trajectories, by rank.
    Raises: ValueError if the parts cannot be equal.
    Source: Magistral (2025), sec. 3.
    """
    if num_trajectories % num_ranks:
        raise ValueError(f"{num_trajectories} rollouts cannot be divided equally among {num_ranks} ranks")
    permutation = np.random.default_rng(index).permutation(num_trajectories)
    return [sorted(members.tolist()) for members in permutation.reshape(num_ranks, -1)]


def pack(trajectories: Sequence[Trajectory], max_tokens: int) -> list[Microbatch]:
    """Put every trajectory into one microbatch of at most `max_tokens` tokens; shared prompts are stored once."""
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    return [join([trajectories[index] for index in members]) for members in collate(lengths, max_tokens)]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A trajectory in a microbatch, with the position of its shared prefix; the own tokens come after the prefix."""

    trajectory: Trajectory
    prefix_start: int
    prefix_length: int

    def own(self, values: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        return values[self.prefix_length :]


def join(trajectories: Sequence[Trajectory]) -> Microbatch:
    """Lay trajectories end to end in one microbatch."""
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
        ref_logprobs=_join_scores(placed),
        sequence_lengths=np.array(lengths, np.int32),
        prefix_starts=np.array([each.prefix_start for each in placed], np.int32),
        prefix_lengths=np.array([each.prefix_length for each in placed], np.int32),
        rewards=np.array([each.trajectory.reward for each in placed], np.float32),
        first_versions=np.array([each.trajectory.first_version for each in placed], np.int32),
    )


def _join_scores(placed: Sequence[_Placed]) -> Float32Array | None:
    scores = [each.trajectory.ref_logprobs for each in placed]
    scored = [each.own(values) for each, values in zip(placed, scores, strict=True) if values is not None]
    assert len(scored) in (0, len(placed)), "the reference scored only some of the trajectories"
    return np.concatenate(scored) if scored else None


def _place(trajectories: Sequence[Trajectory]) -> list[_Placed]:
    """Place trajectories in order; a prompt that is already in the microbatch is shared.

    The prompt is the part before the first token that carries loss.
    """
    placed: list[_Placed] = []
    prompt_starts: dict[bytes, int] = {}
    end = 0
    for trajectory in trajectories:
        prompt = trajectory.token_ids[: int(trajectory.loss_mask.argmax())]
        key = prompt.tobytes()
        if key in prompt_starts:
            current = _Placed(trajectory, prompt_starts[key], len(prompt))
        else:
            prompt_starts[key] = end
            current = _Placed(trajectory, 0, 0)
        placed.append(current)
        end += len(current.own(trajectory.token_ids))
    return placed
