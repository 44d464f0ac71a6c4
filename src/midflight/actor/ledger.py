"""The ledger: the state of every group and rollout of a run, by id. The actor and the simulator use the same ledger.

A started group is in exactly one state:

    open       a member waits, is in flight, or is ungraded
    ready      every member is done; the schedule may choose the group
    chosen     in a batch
    filtered   left out, because all its rewards are equal
    dropped    left out by the schedule, because too many groups were ready
    failed     left out, because a member failed

A member of an open group waits for its admission, is in flight, is ungraded, or is done. Rollout ids follow from group
ids: group g has the rollouts g * group_size, g * group_size + 1, ...

Not here: tokens, prompts and rewards, which the owner of the ledger holds.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import overload

from midflight.actor.failures import count_failure
from midflight.types import ActorState, FleetView, GroupId, ReadyGroup, RolloutId


class ReadyGroups(Sequence[ReadyGroup]):
    """Finished groups, earliest finished first. A view: schedules ask often and look at few groups."""

    def __init__(self) -> None:
        self._groups: OrderedDict[GroupId, ReadyGroup] = OrderedDict()
        self.num_rollouts = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[ReadyGroup]:
        return iter(self._groups.values())

    @overload
    def __getitem__(self, index: int) -> ReadyGroup: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ReadyGroup]: ...
    def __getitem__(self, index: int | slice) -> ReadyGroup | Sequence[ReadyGroup]:
        return list(self._groups.values())[index]

    def add(self, group: ReadyGroup) -> None:
        self._groups[group.group_id] = group
        self.num_rollouts += group.num_rollouts

    def pop(self, group_id: GroupId) -> None:
        self.num_rollouts -= self._groups.pop(group_id).num_rollouts


class Ledger:
    """Counts of a run, kept up to date by its owner, who reports every event.

    `num_started` and `num_finished` do not count filtered, dropped and failed groups: new groups replace them.
    """

    def __init__(self, batch_size: int, group_size: int, state: ActorState | None = None) -> None:
        """Continue from `state`: its open groups stay open, and the owner reports the state of each member."""
        self.batch_size, self._group_size = batch_size, group_size
        self.state = _copy(state or ActorState())  # as in a checkpoint, except the ids of open groups
        self.ready = ReadyGroups()
        self.num_started = self.num_finished = self.state.num_batches * batch_size
        self._open: dict[GroupId, int] = dict.fromkeys(self.state.open_group_ids, group_size)  # members not done
        self._oldest_open = min(self._open, default=self.state.next_group_id)  # no open group has a lower id
        self._waiting: deque[RolloutId] = deque()
        self._ungraded: set[RolloutId] = set()
        # Every swap of weights adds one version to every rollout in flight, so their order by the number of swaps
        # before the first version is constant.
        self._in_flight: dict[RolloutId, int] = {}  # -> swaps before its first version
        self._oldest_in_flight: list[tuple[int, RolloutId]] = []  # a heap; entries that differ from _in_flight are void
        self._version, self._num_swaps = -1, 0

    # --- counts -----------------------------------------------------------------------------------------------

    def fleet(self, version: int, newest_version: int, num_engines: int) -> FleetView:
        self._note_version(version)
        return FleetView(
            version=version,
            newest_version=newest_version,
            num_batches=self.state.num_batches,
            num_started=self.num_started,
            num_engines=num_engines,
            num_waiting=len(self._waiting),
            num_in_flight=len(self._in_flight),
            num_ungraded=len(self._ungraded),
            num_finished=self.num_finished,
            most_versions_in_flight=self._most_versions(),
            oldest_open_group=self._oldest_open_group(),
        )

    def snapshot(self) -> ActorState:
        """Copy of the state for a checkpoint."""
        return _copy(self.state, sorted([*self._open, *(group.group_id for group in self.ready)]))

    @property
    def in_flight(self) -> list[RolloutId]:
        return list(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_ungraded(self) -> int:
        return len(self._ungraded)

    # --- rollouts ---------------------------------------------------------------------------------------------

    def admit(self) -> RolloutId:
        """Return the next rollout to start: the oldest interrupted one, else the next member of a new group."""
        if not self._waiting:
            self._open_group()
        self.num_started += 1
        return self._waiting.popleft()

    def started(self, rollout_id: RolloutId, num_versions: int, version: int) -> None:
        """Record that an engine generates the rollout's first or a later turn.

        `num_versions` counts the different versions of its tokens and `version`, which samples the next token.
        """
        self._note_version(version)
        self._ungraded.discard(rollout_id)
        before_first = self._num_swaps - num_versions
        self._in_flight[rollout_id] = before_first
        heapq.heappush(self._oldest_in_flight, (before_first, rollout_id))

    def interrupted(self, rollout_ids: Sequence[RolloutId]) -> None:
        """Record that these rollouts left their engines unfinished; they now wait in front of all others."""
        for rollout_id in rollout_ids:
            del self._in_flight[rollout_id]
        self._waiting.extendleft(sorted(rollout_ids, reverse=True))
        self.num_started -= len(rollout_ids)

    def ended(self, rollout_id: RolloutId) -> None:
        """Record that the rollout's turn ended; the rollout now waits for a grade or its next turn."""
        del self._in_flight[rollout_id]
        self._ungraded.add(rollout_id)

    def done(self, rollout_id: RolloutId, num_tokens: int) -> bool:
        """Record that the rollout has a grade or failed. Return True if it was the last of its group.

        The owner then makes the group ready, filters it or fails it.
        """
        if rollout_id in self._ungraded:
            self._ungraded.remove(rollout_id)
            self.state.generated_lengths.append(num_tokens)
        group_id = GroupId(rollout_id // self._group_size)
        num_left = self._open[group_id] - 1
        self._open[group_id] = num_left
        return not num_left

    # --- rollouts of an earlier process -----------------------------------------------------------------------

    def put_back(self, rollout_id: RolloutId) -> None:
        """Record an unfinished rollout that waits behind all others."""
        self._waiting.append(rollout_id)

    def took_over(self, rollout_id: RolloutId, *, is_graded: bool = True) -> None:
        """Record a rollout whose turn had ended; the owner calls `done` at once, or when the rollout has a grade."""
        self.num_started += 1
        if not is_graded:
            self._ungraded.add(rollout_id)

    # --- groups whose members are all done --------------------------------------------------------------------

    def make_ready(self, group_id: GroupId) -> None:
        del self._open[group_id]
        self.num_finished += self._group_size
        self.ready.add(ReadyGroup(group_id, self._group_size))

    def filter(self, group_id: GroupId, lengths: Sequence[int]) -> None:
        """Leave out an open group; `lengths` are the response lengths of its members (tokens)."""
        del self._open[group_id]
        self.state.num_filtered_groups += 1
        self._leave_out(lengths)

    def drop(self, group_id: GroupId, lengths: Sequence[int]) -> None:
        """Leave out a ready group; `lengths` are the response lengths of its members (tokens)."""
        self.ready.pop(group_id)
        self.num_finished -= self._group_size
        self.state.num_dropped_groups += 1
        self._leave_out(lengths)

    def fail(self, group_id: GroupId, reason: str) -> None:
        """Leave out an open group; `reason` is the failure of a member."""
        del self._open[group_id]
        self.state.num_failed_groups += 1
        count_failure(self.state.failures, reason)
        self.num_started -= self._group_size

    def take(self, group_ids: Sequence[GroupId]) -> tuple[list[int], list[int]]:
        """Put ready groups into the next batch; return the generated and the left-out lengths since the last batch."""
        for group_id in group_ids:
            self.ready.pop(group_id)
        state = self.state
        state.num_batches += 1
        lengths = state.generated_lengths, state.dropped_lengths
        state.generated_lengths, state.dropped_lengths = [], []
        return lengths

    # ----------------------------------------------------------------------------------------------------------

    def _leave_out(self, lengths: Sequence[int]) -> None:
        self.num_started -= self._group_size
        self.state.dropped_lengths += lengths

    def _open_group(self) -> None:
        group_id = self.state.next_group_id
        self.state.next_group_id = GroupId(group_id + 1)
        self._open[group_id] = self._group_size
        first = group_id * self._group_size
        self._waiting.extend(map(RolloutId, range(first, first + self._group_size)))

    def _note_version(self, version: int) -> None:
        if version != self._version:
            self._version = version
            self._num_swaps += 1

    def _most_versions(self) -> int:
        heap, in_flight = self._oldest_in_flight, self._in_flight
        while heap and in_flight.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return self._num_swaps - heap[0][0] if heap else 0

    def _oldest_open_group(self) -> GroupId | None:
        while self._oldest_open < self.state.next_group_id:
            if self._oldest_open in self._open:
                return self._oldest_open
            self._oldest_open = GroupId(self._oldest_open + 1)
        return None


def _copy(state: ActorState, open_group_ids: list[GroupId] | None = None) -> ActorState:
    return replace(
        state,
        open_group_ids=state.open_group_ids.copy() if open_group_ids is None else open_group_ids,
        generated_lengths=state.generated_lengths.copy(),
        dropped_lengths=state.dropped_lengths.copy(),
        failures=state.failures.copy(),
    )
