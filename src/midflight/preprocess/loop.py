"""Preprocessing in one of two places: as a step of the rollout loop, or as a loop in its own process.

The loop in its own process:

consumes       record k of the stream of chosen groups
waits for      the rollout process to append that record; room in the stream of batches
unblocked by   the append, and the trainer taking batches; a stop request is seen within WAIT_SLICE_S
makes wait     the trainer, when it has no batch

Invariant: batch k depends on record k only. After a restart the loop therefore continues at the length of the stream of
batches; if the process was killed while building a batch, the batch is built again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from midflight.concurrency.wake_up import WAIT_SLICE_S
from midflight.preprocess.batches import Preprocessing, build_batch
from midflight.protocols import Stream
from midflight.tracing.spans import Tracer
from midflight.types import ChosenBatch, TrainingBatch


class Preprocessor:
    """Builds batches and records the build time in the metrics of each."""

    def __init__(self, preprocessing: Preprocessing, tracer: Tracer) -> None:
        self._preprocessing = preprocessing
        self._tracer = tracer

    def batch_of(self, chosen: ChosenBatch) -> TrainingBatch:
        """Build one batch. Raises: RecipeError as `build_batch` does."""
        started_s = time.monotonic()
        with self._tracer.span("preprocess", batch=chosen.index):
            batch = build_batch(chosen, self._preprocessing)
        return replace(batch, metrics={**batch.metrics, "time/preprocess_s": time.monotonic() - started_s})


class PreprocessAtOnce:
    """Stream of chosen groups that turns each appended record into a batch and appends the batch at the same offset."""

    def __init__(self, batches: Stream[TrainingBatch], preprocessor: Preprocessor) -> None:
        self._batches = batches
        self._preprocessor = preprocessor

    @property
    def capacity(self) -> int:
        return self._batches.capacity

    def append(self, record: ChosenBatch, timeout_s: float | None = None) -> int | None:
        """Append the batch of a record, with the return value of `Stream.append`.

        Raises: RecipeError as `build_batch` does.
        """
        return self._batches.append(self._preprocessor.batch_of(record), timeout_s)

    def close(self) -> None:
        self._batches.close()


class PreprocessLoop:
    """The preprocessing loop described above."""

    def __init__(
        self,
        groups: Stream[ChosenBatch],
        batches: Stream[TrainingBatch],
        preprocessor: Preprocessor,
        tracer: Tracer,
    ) -> None:
        self._groups = groups
        self._batches = batches
        self._preprocessor = preprocessor
        self._tracer = tracer

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Build batches until a stop request. Raises: RecipeError as `build_batch` does."""
        while not should_stop():
            index = self._batches.next_offset()
            with self._tracer.span("wait"):
                records = self._groups.read(index, timeout_s=WAIT_SLICE_S)
            if not records:
                continue
            assert records[0].index == index, f"batch {records[0].index} is record {index} of the groups"
            if self._append(self._preprocessor.batch_of(records[0]), should_stop):
                # Record `index` stays: it may be the last record, and a restarted actor resumes from the last record.
                self._groups.trim(index)

    def _append(self, batch: TrainingBatch, should_stop: Callable[[], bool]) -> bool:
        """Append a batch; return False if a stop request comes before there is room."""
        with self._tracer.span("append"):
            while self._batches.append(batch, WAIT_SLICE_S) is None:
                if should_stop():
                    return False
        return True
