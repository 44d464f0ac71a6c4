"""APRIL: start more than a batch needs, train on what is complete first, go on later with what was cut off.

An iteration holds `over_sampling` times a batch of groups, those that were carried over first. When a batch of them is
complete, everything in flight is aborted and keeps its tokens; the groups that finished earliest are trained on, and
all others, finished or partial, are the first of the next iteration. New weights come between iterations only.

Nothing is ever lost: surplus finished groups count as held, or the next iteration could wait for groups that it has;
and partial rollouts go on oldest first, so that the longest ones end too. The lag is measured, not bounded: a group
waits for its slowest member, however many iterations that takes. With `max_versions` an iteration does not end while
a rollout in flight already has tokens of that many versions; it may finish instead of being carried over again.

Source: APRIL, Active Partial Rollouts in Reinforcement Learning (2025).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from midflight.schedules.batches import take_batch
from midflight.types import BatchChoice, FleetView, ReadyGroup

_ROUNDING = 1e-9  # 1.1 * 10 is a little more than 11 in floating point


@dataclass(frozen=True, slots=True)
class AprilSchedule:
    batch_size: int  # rollouts
    group_size: int  # rollouts
    over_sampling: float  # how many times a batch is held; 1 waits for all of it
    max_versions: int | None = None  # weight versions in one rollout
    num_in_flight: int | None = None  # rollouts at a time; None: all that are held
    refill: Literal["at_once", "over_sampled"] = "at_once"  # what takes the place of groups that are filtered
    colocated: bool = True

    @property
    def num_held(self) -> int:
        """Rollouts of an iteration, in whole groups."""
        num_groups = math.ceil(self.over_sampling * self.batch_size / self.group_size - _ROUNDING)
        return num_groups * self.group_size

    @property
    def max_in_flight(self) -> int:
        return self.num_in_flight or self.num_held

    def num_to_admit(self, fleet: FleetView) -> int:
        if self._is_over(fleet):
            return 0
        live = fleet.num_started - fleet.num_batches * self.batch_size
        # Between iterations there is nothing in flight, but what was interrupted waits.
        is_in_iteration = fleet.num_in_flight or not fleet.num_waiting
        if self.refill == "over_sampled" and is_in_iteration:
            return self.num_held if live < self.batch_size else 0
        return max(0, min(self.num_held - live, self.max_in_flight - fleet.num_in_flight))

    def should_abort(self, fleet: FleetView) -> bool:
        return fleet.num_in_flight > 0 and self._is_over(fleet)

    def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
        if fleet.num_in_flight or fleet.num_batches > fleet.version:
            return None
        choice = take_batch(ready, self.batch_size)
        # Who is in it goes by finishing, the order does not: equal batches are equal step by step.
        return choice and replace(choice, train=tuple(sorted(choice.train)))

    def should_update_weights(self, fleet: FleetView) -> bool:
        # An iteration that has handed its batch over starts nothing more, so there is nothing in flight by then.
        return fleet.newest_version > fleet.version

    def _is_over(self, fleet: FleetView) -> bool:
        """Whether this iteration has its batch, or already handed it over."""
        if fleet.num_batches > fleet.version:
            return True
        complete = fleet.num_finished - fleet.num_batches * self.batch_size >= self.batch_size
        return complete and not self._must_finish(fleet)

    def _must_finish(self, fleet: FleetView) -> bool:
        return self.max_versions is not None and fleet.most_versions_in_flight >= self.max_versions
