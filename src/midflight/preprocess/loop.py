"""Preprocessing as a step of the rollout loop, or as loops in processes of their own.

PreprocessLoop, in worker 0:

consumes       record k of the stream of chosen groups; finished groups of its share; scores of other workers
waits for      the rollout process to append record k; scores of groups of batch k; room in the stream of batches
unblocked by   the append, the other workers, the trainer taking batches; a stop request within WAIT_SLICE_S
makes wait     the trainer, when it has no batch

ScoringLoop, in every other worker:

consumes       group k of its share
waits for      the rollout process to append that group; room in its stream of scores
unblocked by   the append, and worker 0 reading scores; a stop request within WAIT_SLICE_S
makes wait     worker 0, when a batch has a group of this share

Invariant: record k of the output depends on record k of the input only. After a restart a loop therefore continues at
the length of its output; if the process was killed while it made a record, the record is made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from midflight.concurrency.wake_up import WAIT_SLICE_S
from midflight.preprocess.ahead import AheadOfBatches
from midflight.preprocess.batches import Preprocessing, build_batch
from midflight.preprocess.scoring import GroupScorer
from midflight.protocols import Stream
from midflight.tracing.spans import Tracer
from midflight.types import ChosenBatch, GroupScores, GroupToScore, TrainingBatch

Record = TypeVar("Record")

# Interval at which worker 0 looks for finished groups while it waits for a batch, which wakes it at once.
_LOOK_S = 0.05


class Preprocessor:
    """Builds batches and records the build time in the metrics of each."""

    def __init__(self, preprocessing: Preprocessing, tracer: Tracer, scored: AheadOfBatches | None = None) -> None:
        """`scored`: the scores of the reference; None without a reference."""
        self._preprocessing = preprocessing
        self._tracer = tracer
        self._scored = scored

    def batch_of(self, chosen: ChosenBatch, should_stop: Callable[[], bool] = lambda: False) -> TrainingBatch | None:
        """Build one batch; return None if a stop request comes first. Raises: RecipeError as `build_batch` does."""
        started_s = time.monotonic()
        with self._tracer.span("preprocess", batch=chosen.index):
            scores = self._scored.scores_of(chosen, should_stop) if self._scored else {}
            if scores is None:
                return None
            batch = build_batch(chosen, self._preprocessing, scores)
        if self._scored:
            self._scored.forget(chosen.actor_state)
        return replace(batch, metrics={**batch.metrics, "time/preprocess_s": time.monotonic() - started_s})

    def work_ahead(self) -> bool:
        """Score a finished group ahead of its batch; return False if there is none."""
        return self._scored is not None and self._scored.score_next()


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
        batch = self._preprocessor.batch_of(record)
        assert batch is not None, "no stop request"
        return self._batches.append(batch, timeout_s)

    def close(self) -> None:
        self._batches.close()


class PreprocessLoop:
    """The loop of worker 0, described above."""

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
        is_busy = False
        while not should_stop():
            index = self._batches.next_offset()
            with self._tracer.span("wait"):
                records = self._groups.read(index, timeout_s=0 if is_busy else _LOOK_S)
            is_busy = bool(records) or self._preprocessor.work_ahead()
            if not records:
                continue
            assert records[0].index == index, f"batch {records[0].index} is record {index} of the groups"
            batch = self._preprocessor.batch_of(records[0], should_stop)
            if batch is not None and append_until(should_stop, self._batches, batch, self._tracer):
                # Record `index` stays: it may be the last record, and a restarted actor resumes from the last record.
                self._groups.trim(index)


class ScoringLoop:
    """The loop of every other worker, described above."""

    def __init__(
        self, share: Stream[GroupToScore], scores: Stream[GroupScores], scorer: GroupScorer, tracer: Tracer
    ) -> None:
        self._share, self._scores, self._scorer, self._tracer = share, scores, scorer, tracer

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Score groups until a stop request. Raises: an error of the reference."""
        while not should_stop():
            offset = self._scores.next_offset()
            with self._tracer.span("wait"):
                groups = self._share.read(offset, timeout_s=WAIT_SLICE_S)
            if groups and append_until(should_stop, self._scores, self._scorer.score(groups[0]), self._tracer):
                self._share.trim(offset + 1)


def append_until(should_stop: Callable[[], bool], stream: Stream[Record], record: Record, tracer: Tracer) -> bool:
    """Append a record; return False if a stop request comes before there is room."""
    with tracer.span("append"):
        while stream.append(record, WAIT_SLICE_S) is None:
            if should_stop():
                return False
    return True
