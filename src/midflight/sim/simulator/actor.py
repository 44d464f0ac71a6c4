"""The actor of a simulation: groups, and the counts that schedules decide by. Does what the real actor does."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from midflight.sim.lengths import Lengths
from midflight.sim.simulator.engines import SimRollout
from midflight.types import FleetView, GroupId, ReadyGroup

_NUM_DRAWN = 1024  # groups whose lengths are drawn at once


@dataclass(slots=True, eq=False)
class SimGroup:
    rollouts: list[SimRollout]
    is_filtered: bool  # all rewards will be equal, and dynamic sampling leaves it out
    num_unfinished: int


@dataclass(slots=True)
class GroupCounts:
    """What became of groups, and of the tokens in those that are not trained on."""

    num_filtered: int = 0
    num_dropped: int = 0
    filtered_tokens: int = 0
    dropped_tokens: int = 0


class ReadyGroups(Sequence[ReadyGroup]):
    """Finished groups, earliest finished first: a view, since schedules are asked often and look at few."""

    def __init__(self) -> None:
        self.groups: OrderedDict[GroupId, ReadyGroup] = OrderedDict()
        self.num_rollouts = 0

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[ReadyGroup]:
        return iter(self.groups.values())

    @overload
    def __getitem__(self, index: int) -> ReadyGroup: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ReadyGroup]: ...
    def __getitem__(self, index: int | slice) -> ReadyGroup | Sequence[ReadyGroup]:
        return list(self.groups.values())[index]

    def add(self, group: ReadyGroup) -> None:
        self.groups[group.group_id] = group
        self.num_rollouts += group.num_rollouts

    def pop(self, group_id: GroupId) -> None:
        self.num_rollouts -= self.groups.pop(group_id).num_rollouts


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


class SimActor:
    """Lengths and filtering depend on the seed and the group alone, not on when a group is started."""

    def __init__(self, lengths: Lengths, group_size: int, filter_rate: float, gradients: Gradients, seed: int) -> None:
        self._group_size, self._filter_rate, self._seed = group_size, filter_rate, seed
        self._gradients = gradients
        self._lengths = lengths
        self._drawn: list[tuple[list[int], bool, bool]] = []
        self._next_group = 0
        self._groups: dict[GroupId, SimGroup] = {}  # open or ready
        self._oldest_open = 0  # no open group has a lower id
        self._to_admit: deque[SimRollout] = deque()
        self._versions = _VersionsInFlight()
        self.ready = ReadyGroups()
        self.counts = GroupCounts()
        self.num_batches = self.num_started = self.num_finished = self.num_in_flight = 0

    def fleet(self, num_updates: int, version: int, newest_version: int, num_engines: int) -> FleetView:
        return FleetView(
            version=version,
            newest_version=newest_version,
            num_batches=self.num_batches,
            num_started=self.num_started,
            num_engines=num_engines,
            num_in_flight=self.num_in_flight,
            num_ungraded=0,
            num_finished=self.num_finished,
            most_versions_in_flight=self._versions.most(num_updates),
            oldest_open_group=self._oldest_open_group(),
        )

    def admit(self, num_updates: int) -> SimRollout:
        """The next rollout, interrupted ones first."""
        if not self._to_admit:
            self._open_group()
        rollout = self._to_admit.popleft()
        self.num_started += 1
        self.num_in_flight += 1
        self._versions.started(rollout, num_updates)
        return rollout

    def ended(self, rollout: SimRollout) -> None:
        """Its last token was sampled."""
        self.num_in_flight -= 1
        self._versions.ended(rollout)
        group = self._groups[GroupId(rollout.group_id)]
        group.num_unfinished -= 1
        if group.num_unfinished:
            return
        if group.is_filtered:
            self.counts.num_filtered += 1
            self.counts.filtered_tokens += self._forget(GroupId(rollout.group_id))
        else:
            self.num_finished += self._group_size
            self.ready.add(ReadyGroup(GroupId(rollout.group_id), self._group_size))

    def interrupted(self, rollouts: Sequence[SimRollout]) -> None:
        """They are the next to be admitted, oldest first."""
        for rollout in rollouts:
            self._versions.ended(rollout)
        self._to_admit.extendleft(sorted(rollouts, key=lambda rollout: -rollout.rollout_id))
        self.num_started -= len(rollouts)
        self.num_in_flight -= len(rollouts)

    def take(self, group_ids: Sequence[GroupId]) -> list[SimRollout]:
        """The rollouts of the next batch."""
        self.num_batches += 1
        taken: list[SimRollout] = []
        for group_id in group_ids:
            self.ready.pop(group_id)
            taken += self._groups.pop(group_id).rollouts
        return taken

    def drop(self, group_id: GroupId) -> None:
        self.ready.pop(group_id)
        self.num_finished -= self._group_size
        self.counts.num_dropped += 1
        self.counts.dropped_tokens += self._forget(group_id)

    def _forget(self, group_id: GroupId) -> int:
        """Another group takes its place; how many tokens it had."""
        self.num_started -= self._group_size
        return sum(rollout.length for rollout in self._groups.pop(group_id).rollouts)

    def _open_group(self) -> None:
        group_id = self._next_group
        self._next_group += 1
        index = group_id % _NUM_DRAWN
        if not index:
            self._draw(group_id)
        lengths, is_filtered, has_gradient = self._drawn[index]
        first = group_id * self._group_size
        rollouts = [SimRollout(first + member, group_id, length, has_gradient) for member, length in enumerate(lengths)]
        self._groups[GroupId(group_id)] = SimGroup(rollouts, is_filtered, self._group_size)
        self._to_admit.extend(rollouts)

    def _draw(self, first_group: int) -> None:
        rng = np.random.default_rng((self._seed, first_group))
        lengths = self._lengths.draw(rng, first_group, _NUM_DRAWN, self._group_size)
        filtered = rng.random(_NUM_DRAWN) < self._filter_rate
        has_gradient = self._gradients.draw(rng, first_group, _NUM_DRAWN)
        self._drawn = list(zip(lengths.tolist(), filtered.tolist(), has_gradient, strict=True))

    def _oldest_open_group(self) -> GroupId | None:
        while self._oldest_open < self._next_group:
            group = self._groups.get(GroupId(self._oldest_open))
            if group is not None and group.num_unfinished:
                return GroupId(self._oldest_open)
            self._oldest_open += 1
        return None


class _VersionsInFlight:
    """How many weight versions the rollout in flight has tokens of that has tokens of the most."""

    def __init__(self) -> None:
        # Each counts one more version with every update, so their order does not change while they are in flight.
        self._heap: list[tuple[int, int, int]] = []  # (updates before it had any version, order, rollout id)
        self._in_flight: dict[int, int] = {}  # rollout id -> order
        self._order = itertools.count()

    def started(self, rollout: SimRollout, num_updates: int) -> None:
        num_versions = rollout.num_versions + (rollout.last_update != num_updates)
        order = next(self._order)
        self._in_flight[rollout.rollout_id] = order
        heapq.heappush(self._heap, (num_updates - num_versions, order, rollout.rollout_id))

    def ended(self, rollout: SimRollout) -> None:
        del self._in_flight[rollout.rollout_id]

    def most(self, num_updates: int) -> int:
        while self._heap and self._in_flight.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return num_updates - self._heap[0][0] if self._heap else 0
