"""The groups of a simulation: how long their rollouts get, which are filtered, which have a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from midflight.sim.lengths import Lengths
from midflight.sim.simulator.engines import SimRollout
from midflight.types import GroupId, RolloutId

_NUM_DRAWN = 1024  # groups whose lengths are drawn at once


@dataclass(frozen=True, slots=True)
class Gradients:
    """Which groups training takes time for: all but a share, or as a list says that is gone through again and again."""

    without_fraction: float = 0.0
    listed: tuple[bool, ...] | None = None

    def draw(self, rng: np.random.Generator, first_group: int, num_groups: int) -> list[bool]:
        if self.listed is None:
            has_gradient: list[bool] = (rng.random(num_groups) >= self.without_fraction).tolist()
            return has_gradient
        return [self.listed[group % len(self.listed)] for group in range(first_group, first_group + num_groups)]


class SimGroups:
    """Groups that are open or ready, drawn when they are first asked for.

    Lengths and filtering depend on the seed and the group alone, not on when a group is started.
    """

    def __init__(self, lengths: Lengths, group_size: int, filter_rate: float, gradients: Gradients, seed: int) -> None:
        self._group_size, self._filter_rate, self._seed = group_size, filter_rate, seed
        self._gradients = gradients
        self._lengths = lengths
        self._drawn: list[tuple[list[int], bool, bool]] = []
        self._groups: dict[GroupId, list[SimRollout]] = {}
        self._to_filter: set[GroupId] = set()  # all rewards will be equal, and dynamic sampling leaves them out
        self.discarded_tokens = 0  # in filtered and dropped groups

    def rollout(self, rollout_id: RolloutId) -> SimRollout:
        """A rollout of a group that is open or ready, or of the next group."""
        group_id, member = divmod(rollout_id, self._group_size)
        rollouts = self._groups.get(GroupId(group_id))
        if rollouts is None:
            rollouts = self._open(GroupId(group_id))
        return rollouts[member]

    def take(self, group_ids: Sequence[GroupId]) -> list[SimRollout]:
        """The rollouts of the next batch."""
        return [rollout for group_id in group_ids for rollout in self._groups.pop(group_id)]

    def discard(self, group_id: GroupId) -> list[int]:
        """The lengths of a group that is filtered or dropped (tokens)."""
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
