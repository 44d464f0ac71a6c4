"""The step every schedule ends with: whole groups, in the order given, until the batch is full."""

from __future__ import annotations

from collections.abc import Iterable

from midflight.types import BatchChoice, GroupId, ReadyGroup


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
