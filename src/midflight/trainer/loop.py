"""The training loop: one batch, one optimizer step, new weights, one line of metrics.

consumes       batch k from the stream, with weights of version k
waits for      the actor to append that batch
unblocked by   the append; a stop request is seen within WAIT_SLICE_S
makes wait     nobody: publishing weights never waits for an engine

Every rank runs the loop, with the same steps in the same order, on its local batch. Only rank 0 decides on the next
step and writes files. If an engine lacks the present weights and the sender kept no copy, all ranks publish them again,
also while they wait for a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from midflight.concurrency.wake_up import WAIT_SLICE_S
from midflight.protocols import MetricsSink, Stream, WeightSender
from midflight.tracing.spans import Tracer
from midflight.trainer.best_checkpoint import BestCheckpoint
from midflight.trainer.checkpoints import checkpoint_of, oldest_checkpoint_version, save_checkpoint
from midflight.trainer.give_up import GiveUpPolicy
from midflight.trainer.state import TrainerState
from midflight.trainer.step import TrainStep
from midflight.trainer.step_log import StepLog
from midflight.types import TrainingBatch
from midflight.weights.null_sender import NullSender

_READ_TIMEOUT_S = 60.0  # for a batch that rank 0 has already read


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Limits and directories of the training loop."""

    max_steps: int
    checkpoints: Path
    rejected_batches: Path  # directory for the last batch of a run that stops for non-finite losses
    checkpoint_every: int  # optimizer steps
    keep_checkpoints: int = 1
    evaluated_every: int | None = None  # optimizer steps between checkpoints that are evaluated; None: none are
    best: BestCheckpoint | None = None  # kept besides the newest checkpoints
    max_nonfinite_steps: int = 5  # in a row
    max_seconds: float | None = None  # wall-clock limit; None: no limit


class TrainLoop:
    """Training loop of one rank."""

    def __init__(
        self,
        settings: LoopSettings,
        step: TrainStep,
        batches: Stream[TrainingBatch],
        state: TrainerState,
        tracer: Tracer,
        metrics: MetricsSink | None = None,
        sender: WeightSender | None = None,
    ) -> None:
        """`state`: updated in place. `metrics`, `sender`: None on all ranks except rank 0; `sender`: the backend's."""
        self.state = state
        self._settings, self._step, self._batches, self._tracer = settings, step, batches, tracer
        self._backend, self._group, self._sender = step.backend, step.group, sender or NullSender()
        self._log = StepLog(metrics, tracer, state, lambda: self._sender.sent_bytes)
        self._give_up = GiveUpPolicy(settings.max_nonfinite_steps, settings.rejected_batches)

    def serve_weights(self, happens: Callable[[float], bool], should_stop: Callable[[], bool]) -> bool:
        """Publish to engines that join until `happens(timeout_s)` is True; return False at a stop request before that.

        Rank 0 decides.
        """
        while True:
            asked_to_stop = should_stop()  # every rank calls it: the call is its heartbeat
            happened = self._group.rank == 0 and happens(WAIT_SLICE_S)
            decision = self._group.broadcast(-1 if asked_to_stop else int(happened))
            if decision:
                return decision > 0
            self._publish_again()

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Train until the last step, the time limit or a stop request, then write a checkpoint.

        Raises: NonFiniteLossError after too many skipped steps in a row; CheckpointError.
        """
        started = time.monotonic() - self.state.wall_s
        while (batches := self._next(should_stop)) is not None:
            self._publish_again()
            for batch in batches:
                self._train_on(batch, started)
                if self._is_checkpoint_due():
                    self._checkpoint()
        self._checkpoint()

    def _next(self, should_stop: Callable[[], bool]) -> list[TrainingBatch] | None:
        """Return the next batch, [] if there is none yet, None at the end of training; rank 0 decides."""
        with self._tracer.span("wait"):
            asked_to_stop = should_stop()  # every rank calls it: the call is its heartbeat
            batches = self._read_unless_done(asked_to_stop) if self._group.rank == 0 else []
            num_batches = self._group.broadcast(-1 if batches is None else len(batches))
            if num_batches < 0:
                return None
            return self._read(timeout_s=_READ_TIMEOUT_S) if num_batches and not batches else batches

    def _publish_again(self) -> None:
        """Publish the present weights once more if the sender asks for it; rank 0 decides.

        A batch that has been read is trained on next, so an engine that keeps asking does not stop the training.
        """
        if self._group.broadcast(self._sender.wants_weights()):
            with self._tracer.span("publish_again"):
                self._backend.publish_weights(self.state.version)

    def _read_unless_done(self, asked_to_stop: bool) -> list[TrainingBatch] | None:
        settings, state = self._settings, self.state
        out_of_time = settings.max_seconds is not None and state.wall_s >= settings.max_seconds
        if state.version >= settings.max_steps or out_of_time or asked_to_stop:
            return None
        return self._read(timeout_s=WAIT_SLICE_S)

    def _read(self, timeout_s: float) -> list[TrainingBatch]:
        return self._batches.read(self.state.version, max_records=1, timeout_s=timeout_s)

    def _train_on(self, batch: TrainingBatch, started: float) -> None:
        state = self.state
        assert batch.index == state.version, f"batch {batch.index} reached version {state.version}"
        with self._tracer.span("train", version=state.version):
            step = self._step(batch)
        state.count(batch)
        with self._tracer.span("publish"):
            self._backend.publish_weights(state.version, step.changed)
        state.wall_s = time.monotonic() - started
        self._log.write(batch, step, state, self._batches.next_offset() - state.version)
        if self._give_up.is_reached(batch, step.skipped):
            if self._group.rank == 0:
                self._give_up.keep(batch)
            self._checkpoint()
            raise self._give_up.error(batch)

    def _is_checkpoint_due(self) -> bool:
        version, evaluated_every = self.state.version, self._settings.evaluated_every
        is_evaluated = evaluated_every is not None and version % evaluated_every == 0
        return is_evaluated or version % self._settings.checkpoint_every == 0

    def _checkpoint(self) -> None:
        settings = self._settings
        with self._tracer.span("checkpoint"):
            if self._group.broadcast(checkpoint_of(settings.checkpoints, self.state.version).exists()):
                return
            if self._group.rank > 0:
                self._backend.save(settings.checkpoints)
                return
            keep, also_keep = settings.keep_checkpoints, settings.best.versions_to_keep() if settings.best else ()
            save_checkpoint(settings.checkpoints, self.state, self._backend.save, keep, also_keep)
            if settings.best:
                settings.best.update_link()
        # A restart may use any of the newest checkpoints, and the actor resumes after the last batch in the stream.
        self._batches.trim(oldest_checkpoint_version(settings.checkpoints, among=keep) - 1)
