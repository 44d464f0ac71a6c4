"""Groups of a simulation: the lengths of their rollouts, and which groups are filtered or have a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from midflight.sim.lengths import Lengths
from midflight.sim.simulator.engines import SimRollout
from midflight.types import GroupId, RolloutId

_NUM_DRAWN = 1024  # groups drawn at once


@dataclass(frozen=True, slots=True)
class Gradients:
    """Groups that cost training time: all but a random share, or as a list says, which is repeated."""

    without_fraction: float = 0.0
    listed: tuple[bool, ...] | None = None

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int) -> list[bool]:
        if self.listed is None:
            has_gradient: list[bool] = (rng.random(num_groups) >= self.without_fraction).tolist()
            return has_gradient
        return [self.listed[group % len(self.listed)] for group in range(first_group, first_group + num_groups)]


class SimGroups:
    """Open and ready groups, each drawn at its first rollout.

    Lengths and filtering depend only on the seed and the group, not on the time at which a group starts.
    """

    def __init__(self, lengths: Lengths, group_size: int, filter_rate: float, gradients: Gradients, seed: int) -> None:
        self._group_size, self._filter_rate, self._seed = group_size, filter_rate, seed
        self._gradients = gradients
        self._lengths = lengths
        self._drawn: list[tuple[list[int], bool, bool]] = []
        self._groups: dict[GroupId, list[SimRollout]] = {}
        self._to_filter: set[GroupId] = set()  # groups with equal rewards, which dynamic sampling leaves out
        self.discarded_tokens = 0  # in filtered and dropped groups

    def rollout(self, rollout_id: RolloutId) -> SimRollout:
        """Return a rollout of an open or ready group, or of the next group, which is opened."""
        group_id, member = divmod(rollout_id, self._group_size)
        rollouts = self._groups.get(GroupId(group_id))
        if rollouts is None:
            rollouts = self._open(GroupId(group_id))
        return rollouts[member]

    def take(self, group_ids: Sequence[GroupId]) -> list[SimRollout]:
        """Remove groups for the next batch and return their rollouts."""
        return [rollout for group_id in group_ids for rollout in self._groups.pop(group_id)]

    def discard(self, group_id: GroupId) -> list[int]:
        """Remove a filtered or dropped group and return its lengths (tokens)."""
        lengths = [rollout.length for rollout in self._groups.pop(group_id)]
        self.discarded_tokens += sum(lengths)
        self._to_filter.discard(group_id)
        return lengths

    def is_filtered(self, group_id: GroupId) -> bool:
        return group_id in self._to_filter

    def _open(self, group_id: GroupId) -> list[SimRollout]:
        index = group_id % _NUM_DRAWN
        if not index:
            self._draw(group_id)
        lengths, is_filtered, has_gradient = self._drawn[index]
        if is_filtered:
            self._to_filter.add(group_id)
        first = group_id * self._group_size
        rollouts = [SimRollout(first + member, group_id, length, has_gradient) for member, length in enumerate(lengths)]
        self._groups[group_id] = rollouts
        return rollouts

    def _draw(self, first_group: int) -> None:
        rng = np.random.default_rng((self._seed, first_group))
        lengths = self._lengths.draw(rng, first_group, _NUM_DRAWN, self._group_size)
        filtered = rng.random(_NUM_DRAWN) < self._filter_rate
        has_gradient = self._gradients.draw(rng, first_group, _NUM_DRAWN)
        self._drawn = list(zip(lengths.tolist(), filtered.tolist(), has_gradient, strict=True))
