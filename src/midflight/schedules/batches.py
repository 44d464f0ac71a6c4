"""Functions shared by several schedules: forming a batch, and the two halves of the bound on the lag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from midflight.types import BatchChoice, FleetView, GroupId, ReadyGroup


def take_batch(groups: Iterable[ReadyGroup], batch_size: int) -> BatchChoice | None:
    """Choose the first groups that add up to exactly `batch_size` rollouts; None while there are too few."""
    chosen: list[GroupId] = []
    num_rollouts = 0
    for group in groups:
        chosen.append(group.group_id)
        num_rollouts += group.num_rollouts
        if num_rollouts == batch_size:
            return BatchChoice(train=tuple(chosen))
    return None


def num_startable(fleet: FleetView, batch_size: int, max_lag: int) -> int:
    """Number of rollouts that may start now so that no token's lag exceeds `max_lag`, with batches in start order."""
    return (fleet.version + max_lag + 1) * batch_size - fleet.num_started


def take_in_start_order(fleet: FleetView, ready: Sequence[ReadyGroup], batch_size: int) -> BatchChoice | None:
    """Choose a batch in start order, from the groups older than every unfinished group; None while there are too few.

    All groups have the same number of rollouts.
    """
    oldest_open = fleet.oldest_open_group
    if oldest_open is None:
        return take_batch(_by_start(ready), batch_size)
    # All older groups are trained, ready or dropped. They are often too few, while very many younger groups are ready:
    # this check avoids sorting.
    num_before = oldest_open * next((group.num_rollouts for group in ready), 0)
    if num_before < (fleet.num_batches + 1) * batch_size:
        return None
    return take_batch(_by_start(group for group in ready if group.group_id < oldest_open), batch_size)


def _by_start(groups: Iterable[ReadyGroup]) -> list[ReadyGroup]:
    return sorted(groups, key=lambda group: group.group_id)
