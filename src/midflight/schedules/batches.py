"""What several schedules share: making up a batch, and the two halves of a bound on the lag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from midflight.types import BatchChoice, FleetView, GroupId, ReadyGroup


def take_batch(groups: Iterable[ReadyGroup], batch_size: int) -> BatchChoice | None:
    """The first groups that make up `batch_size` rollouts exactly, or None while there are too few."""
    chosen: list[GroupId] = []
    num_rollouts = 0
    for group in groups:
        chosen.append(group.group_id)
        num_rollouts += group.num_rollouts
        if num_rollouts == batch_size:
            return BatchChoice(train=tuple(chosen))
    return None


def num_startable(fleet: FleetView, batch_size: int, max_lag: int) -> int:
    """Rollouts that may be started now if no token's lag may be above `max_lag`, given batches in start order."""
    return (fleet.version + max_lag + 1) * batch_size - fleet.num_started


def in_start_order(fleet: FleetView, ready: Sequence[ReadyGroup]) -> list[ReadyGroup]:
    """The ready groups that nothing started earlier is still to come before, in the order they were started."""
    oldest_open = fleet.oldest_open_group
    before_open = ready if oldest_open is None else [group for group in ready if group.group_id < oldest_open]
    return sorted(before_open, key=lambda group: group.group_id)
