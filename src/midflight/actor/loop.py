"""The rollout loop: generate, have new weights adopted in flight, hand over the groups of each batch.

consumes       problems, grades, and the numbers of the versions that the trainer publishes; never a tensor
waits for      grades or a new version, when the schedule admits no rollout and nothing is in flight
unblocked by   an answer of the grader, a new version of the trainer; a stop request within WAIT_SLICE_S
makes wait     the trainer, when it has no batch
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from midflight.actor.actor import Actor
from midflight.actor.iteration import iterate
from midflight.actor.partials import PartialBuffer
from midflight.actor.rollout_stats import RolloutStats
from midflight.concurrency.wake_up import WAIT_SLICE_S
from midflight.errors import StreamError
from midflight.protocols import Generator, PublishedVersions, Schedule
from midflight.tracing.spans import Tracer
from midflight.types import BatchChoice, ChosenBatch, FleetView


@dataclass(frozen=True, slots=True)
class Intervals:
    """Minimum intervals between expensive chores (seconds); 0 runs them every iteration."""

    grades_s: float = 0.01  # exchange responses for grades, while rollouts are in flight
    save_s: float = 0.1  # write the rollouts in flight to the partial-rollout buffer
    max_save_share: float = 0.05  # of the time of the loop: with thousands of rollouts, saves are further apart


class BatchSink(Protocol):
    """Destination of chosen groups: a stream, or preprocessing in the same process."""

    @property
    def capacity(self) -> int:
        """Same as `Stream.capacity`; at least 2."""
        ...

    def append(self, record: ChosenBatch, timeout_s: float | None = None) -> int | None:
        """Same as `Stream.append`."""
        ...


class SideEvaluation(Protocol):
    """An evaluation by the engines of the run, beside the training rollouts. It samples with one weight version."""

    @property
    def is_running(self) -> bool: ...

    @property
    def is_generating(self) -> bool:
        """True if a response of the evaluation is in flight."""
        ...

    def is_due_at(self, version: int) -> bool:
        """True if this version should be evaluated and has not been."""
        ...

    def step(self, version: int, timeout_s: float = 0.0) -> None:
        """Begin or continue an evaluation of the engines' version; wait up to `timeout_s` for a grade."""
        ...

    def stop(self) -> None:
        """Abort the evaluation; it leaves no result."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        ...


class RolloutLoop:
    def __init__(
        self,
        actor: Actor,
        generator: Generator,
        schedule: Schedule,
        versions: PublishedVersions,
        sink: BatchSink,
        tracer: Tracer,
        partials: PartialBuffer | None = None,
        intervals: Intervals = Intervals(),
        evaluation: SideEvaluation | None = None,
    ) -> None:
        """With `partials`, rollouts in flight are saved there every `intervals.save_s` and at the end.

        With `evaluation`, `generator` counts the requests of the evaluation as well.
        """
        self._actor = actor
        self._generator = generator
        self._schedule = schedule
        self._versions = versions
        self._sink = sink
        self._tracer = tracer
        self._partials = partials
        self._intervals = intervals
        self._evaluation = evaluation
        self._newest = 0  # newest version of the weights, as of this iteration
        self._asked = generator.weight_version  # the newest version that the generator was asked to adopt
        self._next_grades_s = self._next_save_s = 0.0
        self._stats = RolloutStats(tracer, actor.state)

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Run iterations until `should_stop()` is true."""
        while not should_stop():
            newest = self._versions.newest_version()
            assert newest is not None, "the trainer publishes its first weights before the loop starts"
            # After a restart, the trainer publishes versions again that the engines already have.
            self.iteration(max(newest, self._generator.weight_version))
        if self._evaluation:
            self._evaluation.stop()
        self._actor.stop()
        self._save()

    def iteration(self, newest: int) -> None:
        """Run one iteration and the chores that are due; `newest` is the newest version of the weights."""
        self._newest = newest
        handed_over = iterate(self._schedule, self._actor.ledger, self)
        if self._evaluation and not self._update_pending:
            self._evaluation.step(self._generator.weight_version)
        if time.monotonic() >= self._next_save_s:
            self._save_and_plan_next()
        if not self._generator.num_in_flight and not handed_over:
            self._wait()

    def _wait(self) -> None:
        """Wait for grades or a new version, unless the schedule has rollouts to start or an update is going on."""
        if self._update_pending:
            return
        if self._actor.num_ungraded:
            with self._tracer.span("grade"):
                self._actor.collect_grades(WAIT_SLICE_S)
        elif self._evaluation and self._evaluation.is_running:
            with self._tracer.span("grade"):
                self._evaluation.step(self._generator.weight_version, WAIT_SLICE_S)
        elif not self._schedule.num_to_admit(self.fleet()):
            with self._tracer.span("wait"):
                self._versions.wait(newer_than=self._newest, timeout_s=WAIT_SLICE_S)

    # --- steps of an iteration --------------------------------------------------------------------------------

    def fleet(self) -> FleetView:
        return self._actor.fleet(self._newest)

    def update_weights(self) -> None:
        # An evaluation is of one version.
        if self._newest <= self._asked or (self._evaluation and self._evaluation.is_running):
            return
        self._asked = self._newest
        self._stats.note_asked(self._newest)
        self._generator.adopt(self._newest)
        self._note_version()

    def abort(self) -> None:
        self._actor.abort()

    def admit(self, num_rollouts: int) -> None:
        self._actor.admit(num_rollouts)

    def generate(self) -> None:
        # A pending update advances with every step, even if there is nothing left to sample.
        num_in_flight = self._generator.num_in_flight
        if num_in_flight:
            with self._tracer.span("decode", num_seqs=num_in_flight):
                self._actor.step()
        elif self._update_pending:
            with self._tracer.span("update"):
                self._actor.step()
        self._note_version()
        if (now_s := time.monotonic()) >= self._next_grades_s:
            self._actor.collect_grades()
            self._next_grades_s = now_s + self._intervals.grades_s

    def has_room(self) -> bool:
        """Return False while the stream of batches is full. No I/O: version v shows that batch v - 1 has been read."""
        has_room = self._actor.ledger.state.num_batches < self._newest - 1 + self._sink.capacity
        return has_room and not self._waits_for_evaluated_version()

    def _waits_for_evaluated_version(self) -> bool:
        """True if the trainer could overtake the engines at a version that should be evaluated.

        Batch v makes version v + 1. If version v is due, batch v waits until the engines have adopted version v, unless
        they would not: the schedule may skip this version, or an evaluation may still hold updates back.
        """
        evaluation, fleet = self._evaluation, self.fleet()
        due = fleet.num_batches
        if evaluation is None or evaluation.is_running or not evaluation.is_due_at(due) or fleet.version >= due:
            return False
        idle = replace(fleet, num_in_flight=0, num_ungraded=0)
        return fleet.newest_version < due or self._schedule.should_update_weights(idle)

    def hand_over(self, choice: BatchChoice) -> None:
        batch = self._actor.take(choice)
        if batch is None:
            return
        metrics = self._stats.snapshot(batch.actor_state, self._actor.ledger)
        if self._evaluation:
            metrics |= self._evaluation.take_metrics()
        batch = replace(batch, metrics=metrics)
        with self._tracer.span("hand_over", batch=batch.index):
            offset = self._sink.append(batch, timeout_s=0)
        if offset is None:
            raise StreamError(f"the stream of batches is full at batch {batch.index}")

    @property
    def _update_pending(self) -> bool:
        return self._generator.weight_version < self._asked

    def _note_version(self) -> None:
        """Count an update if one has just ended."""
        if self._stats.note_version(self._generator.weight_version):
            self._actor.note_update()

    def _save_and_plan_next(self) -> None:
        started_s = time.monotonic()
        self._save()
        took_s = time.monotonic() - started_s
        self._next_save_s = started_s + max(self._intervals.save_s, took_s / self._intervals.max_save_share)

    def _save(self) -> None:
        if self._partials is None:
            return
        with self._tracer.span("save"):
            self._partials.save(self._actor.state, self._actor.open_rollouts(), self._actor.tokens_of)
