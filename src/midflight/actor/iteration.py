"""The decisions of one iteration of the rollout loop, and their order. The loop and the simulator both run this."""

from __future__ import annotations

from typing import Protocol

from midflight.actor.ledger import Ledger
from midflight.protocols import Schedule
from midflight.types import BatchChoice, FleetView


class Rollouts(Protocol):
    """The generation side of a run, which carries decisions out and reports to its ledger."""

    def fleet(self) -> FleetView: ...

    def update_weights(self) -> None:
        """Make the engines adopt the newest weights, unless an update is still pending."""
        ...

    def abort(self) -> None:
        """Interrupt everything in flight."""
        ...

    def admit(self, num_rollouts: int) -> None: ...

    def generate(self) -> None:
        """Sample the next token of everything in flight, and collect grades."""
        ...

    def has_room(self) -> bool:
        """Return False while so many batches wait for the trainer that no more can be appended."""
        ...

    def hand_over(self, choice: BatchChoice) -> None:
        """Append the chosen groups as the next batch, and drop the others that `choice` names."""
        ...


def iterate(schedule: Schedule, ledger: Ledger, rollouts: Rollouts) -> bool:
    """Run one iteration: weights, interruptions, admissions, a token, batches. Return True if a batch was handed over.

    The schedule is asked only what can matter: updating if there are newer weights, aborting if something is in
    flight, choosing if a batch is ready. Finished groups stay ready while there is no room for a batch. This changes no
    batch: it is made of the groups that finished first, or were started first, whenever it is chosen.
    """
    fleet = rollouts.fleet()
    if fleet.newest_version > fleet.version and schedule.should_update_weights(fleet):
        rollouts.update_weights()
        fleet = rollouts.fleet()
    if fleet.num_in_flight and schedule.should_abort(fleet):
        rollouts.abort()
        fleet = rollouts.fleet()
    num_new = schedule.num_to_admit(fleet)
    if num_new:
        rollouts.admit(num_new)
    rollouts.generate()
    handed_over = False
    while ledger.ready.num_rollouts >= ledger.batch_size and rollouts.has_room():
        choice = schedule.choose_batch(rollouts.fleet(), ledger.ready)
        if choice is None or not (choice.train or choice.drop):
            break
        rollouts.hand_over(choice)
        handed_over = handed_over or bool(choice.train)
    return handed_over
