"""APRIL: start more rollouts than a batch needs, train on the first complete batch, resume the other rollouts later.

An iteration holds `over_sampling` batches of groups; groups carried over from the last iteration come first. When a
batch of groups is complete, all rollouts in flight are aborted and keep their tokens. The groups that finished earliest
are trained on. All other groups, finished or partial, come first in the next iteration. Weights change between
iterations only.

No rollout is ever lost. Surplus finished groups count as held; otherwise the next iteration could wait for groups that
are already finished. Partial rollouts resume oldest first, so the longest rollouts end too. The lag is measured, not
bounded: a group waits for its slowest member for any number of iterations. With `max_versions`, an iteration does not
end while a rollout in flight has tokens of that many versions; the rollout can finish instead of being carried over
again.

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
    """Over-sampling with partial rollouts."""

    batch_size: int  # rollouts
    group_size: int  # rollouts
    over_sampling: float  # rollouts held / batch_size; with 1 an iteration waits for all its rollouts
    max_versions: int | None = None  # weight versions in one rollout; None: no limit
    num_in_flight: int | None = None  # rollouts at a time; None: all held rollouts
    refill: Literal["at_once", "over_sampled"] = "at_once"  # when filtered groups are replaced
    colocated: bool = True

    @property
    def num_held(self) -> int:
        """Number of rollouts in an iteration, in whole groups."""
        num_groups = math.ceil(self.over_sampling * self.batch_size / self.group_size - _ROUNDING)
        return num_groups * self.group_size

    @property
    def max_in_flight(self) -> int:
        return self.num_in_flight or self.num_held

    def num_to_admit(self, fleet: FleetView) -> int:
        if self._is_over(fleet):
            return 0
        live = fleet.num_started - fleet.num_batches * self.batch_size
        # Between iterations no rollout is in flight, but interrupted rollouts wait.
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
        # Membership depends on the order of finishing; the order within the batch must not, so that equal batches give
        # equal steps.
        return choice and replace(choice, train=tuple(sorted(choice.train)))

    def should_update_weights(self, fleet: FleetView) -> bool:
        # An iteration starts no rollouts after it has handed over its batch, so none is in flight when weights arrive.
        return fleet.newest_version > fleet.version

    def _is_over(self, fleet: FleetView) -> bool:
        """Return True if this iteration has a complete batch or has handed its batch over."""
        if fleet.num_batches > fleet.version:
            return True
        complete = fleet.num_finished - fleet.num_batches * self.batch_size >= self.batch_size
        return complete and not self._must_finish(fleet)

    def _must_finish(self, fleet: FleetView) -> bool:
        return self.max_versions is not None and fleet.most_versions_in_flight >= self.max_versions
