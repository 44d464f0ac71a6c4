"""Preprocessing processes build every batch once, despite kills, and equal to the batches built in process."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.errors import StreamError
from midflight.preprocess.advantages import group_mean
from midflight.preprocess.ahead import AheadOfBatches, OtherWorker, SendAhead
from midflight.preprocess.batches import Preprocessing
from midflight.preprocess.loop import PreprocessAtOnce, PreprocessLoop, Preprocessor, ScoringLoop
from midflight.preprocess.scoring import GroupScorer
from midflight.protocols import Record
from midflight.streams.codec import Codec
from midflight.streams.memory import MemoryStream
from midflight.tracing.spans import Tracer
from midflight.types import (
    ActorState,
    ChosenBatch,
    FinishReason,
    Float32Array,
    GeneratedTokens,
    GroupId,
    GroupScores,
    GroupToScore,
    Microbatch,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutId,
    RolloutStatus,
    Segment,
    TrainingBatch,
)
from narrowing import present

GROUP_SIZE, NUM_GROUPS = 3, 2
CLOCK = "time/preprocess_s"


class CountingReference:
    """Reference whose log-probabilities tell tokens and positions apart; it counts the tokens that it scored."""

    def __init__(self) -> None:
        self.num_scored = 0

    def logprobs(self, microbatch: Microbatch) -> Float32Array:
        self.num_scored += int(microbatch.loss_mask.sum())
        logprobs = -0.5 * (microbatch.token_ids + 1) - 0.01 * microbatch.position_ids
        return np.where(microbatch.loss_mask, logprobs, 0).astype(np.float32)


PREPROCESSING = Preprocessing(group_mean, max_tokens=64, max_response_tokens=20)
TRACER = Tracer(None, "test")
SEND_CAPACITY = 2  # groups on the way to a worker


T = TypeVar("T")


class KilledError(Exception):
    pass


class Life:
    """Lifetime of the process: raises KilledError at the check number `num_checks`."""

    def __init__(self, num_checks: int) -> None:
        self._num_left = num_checks

    def check(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise KilledError


class KillingStream(MemoryStream[Record]):
    """Stream that may kill its process before or after each operation; the records survive."""

    life: ClassVar = Life(10**9)  # of the process that is running

    def append(self, record: Record, timeout_s: float | None = None) -> int | None:
        return self._checked(lambda: super(KillingStream, self).append(record, timeout_s=0))

    def read(self, from_offset: int, max_records: int = 1, timeout_s: float | None = None) -> list[Record]:
        return self._checked(lambda: super(KillingStream, self).read(from_offset, max_records, timeout_s=0))

    def trim(self, before_offset: int) -> None:
        self._checked(lambda: super(KillingStream, self).trim(before_offset))

    def _checked(self, operation: Callable[[], T]) -> T:
        self.life.check()
        result = operation()
        self.life.check()
        return result


@contextlib.contextmanager
def living(num_checks: int) -> Iterator[None]:
    """Run the block in a process that dies at a check; the process before it goes on afterwards."""
    before = KillingStream.life
    KillingStream.life = Life(num_checks)
    try:
        with contextlib.suppress(KilledError):
            yield
    finally:
        KillingStream.life = before


def rollout(number: int, group_id: int, reward: float) -> Rollout:
    length = 1 + number * 7 % 20
    tokens = np.arange(length, dtype=np.int32)
    return Rollout(
        RolloutId(number),
        GroupId(group_id),
        RolloutStatus.FINISHED,
        segments=[
            Segment.given([50, group_id]),
            Segment(
                GeneratedTokens(tokens, -0.1 * (tokens + 1).astype(np.float32), np.full_like(tokens, group_id // 4))
            ),
        ],
        finish_reason=FinishReason.LENGTH if length == 20 else FinishReason.STOP,
        reward=reward,
        reward_components={"accuracy": reward},
    )


def group(group_id: int) -> RolloutGroup:
    first = group_id * GROUP_SIZE
    members = [rollout(first + member, group_id, float((group_id + member) % 3 == 0)) for member in range(GROUP_SIZE)]
    return RolloutGroup(GroupId(group_id), Problem(str(group_id), "?", "!"), members)


def chosen(index: int) -> ChosenBatch:
    groups = [group(index * NUM_GROUPS + number) for number in range(NUM_GROUPS)]
    return ChosenBatch(
        index,
        groups,
        generated_lengths=[len(each.generated) for each in groups[0].rollouts],
        dropped_lengths=[index],
        metrics={"in_flight": float(index)},
        actor_state=ActorState(next_group_id=GroupId((index + 1) * NUM_GROUPS), num_batches=index + 1),
    )


def message(batch: TrainingBatch) -> bytes:
    """All fields of a batch except its build time, encoded for a bitwise comparison."""
    metrics = {name: value for name, value in batch.metrics.items() if name != CLOCK}
    return Codec(TrainingBatch).encode(replace(batch, metrics=metrics))


def scorer() -> GroupScorer:
    return GroupScorer(CountingReference(), PREPROCESSING.max_tokens, TRACER)


def in_process(num_batches: int) -> list[bytes]:
    batches: MemoryStream[TrainingBatch] = MemoryStream(capacity=100)
    ahead = AheadOfBatches(scorer(), PREPROCESSING, TRACER)
    sink = PreprocessAtOnce(batches, Preprocessor(PREPROCESSING, TRACER, ahead))
    assert [sink.append(chosen(index)) for index in range(num_batches)] == list(range(num_batches))
    return [message(batch) for batch in batches.read(0, 100)]


class Streams:
    """Streams of a run with `num_workers` preprocessing processes, and the loops of these processes."""

    def __init__(self, num_workers: int = 1, kind: type[MemoryStream[Any]] = MemoryStream, capacity: int = 100) -> None:
        self.groups: MemoryStream[ChosenBatch] = kind(100)
        self.batches: MemoryStream[TrainingBatch] = kind(capacity)
        self.unscored: list[MemoryStream[GroupToScore]] = [kind(SEND_CAPACITY) for _ in range(num_workers)]
        self.scores: list[MemoryStream[GroupScores]] = [kind(SEND_CAPACITY) for _ in range(num_workers)]
        self.send = SendAhead(self.unscored, PREPROCESSING, TRACER)
        self.reference = CountingReference()  # of worker 0

    def send_batch(self, index: int) -> None:
        record = chosen(index)
        for each in record.groups:
            self.send(each)
        codec = Codec(ChosenBatch)
        self.groups.append(codec.decode(codec.encode(record)))

    def worker_0(self) -> PreprocessLoop:
        others = [OtherWorker(*streams) for streams in zip(self.unscored[1:], self.scores[1:], strict=True)]
        scored_by = GroupScorer(self.reference, PREPROCESSING.max_tokens, TRACER)
        ahead = AheadOfBatches(scored_by, PREPROCESSING, TRACER, self.unscored[0], others)
        return PreprocessLoop(self.groups, self.batches, Preprocessor(PREPROCESSING, TRACER, ahead), TRACER)

    def run_other(self, worker: int) -> None:
        """Run a worker until it has scored every group that was sent to it, or its scores have no room."""
        share, scores = self.unscored[worker], self.scores[worker]
        calls = itertools.count()
        ScoringLoop(share, scores, scorer(), TRACER).run(
            lambda: scores.next_offset() == share.next_offset() or next(calls) > SEND_CAPACITY
        )

    def build(self, num_batches: int) -> None:
        self.worker_0().run(self.has_built(num_batches))

    def has_built(self, num_batches: int) -> Callable[[], bool]:
        return lambda: self.batches.next_offset() == num_batches

    def built(self) -> list[bytes]:
        return [message(batch) for batch in self.batches.read(0, 100, timeout_s=0)]


def times(number: int) -> Callable[[], bool]:
    """Return a stop condition of a loop that runs so many iterations."""
    calls = itertools.count()
    return lambda: next(calls) >= number


lives = st.tuples(  # new records before worker 0 starts, and checks until it and until every other worker is killed
    st.integers(0, 3), st.integers(0, 40), st.integers(0, 12)
)


@pytest.mark.slow
@given(st.lists(lives, max_size=12), st.integers(1, 3))
def test_each_batch_is_built_once_despite_kills(lives: list[tuple[int, int, int]], num_workers: int) -> None:
    streams = Streams(num_workers, KillingStream)
    num_records = 0
    for num_new, num_checks, num_checks_of_others in [*lives, (1, 10**6, 10**6)]:
        for index in range(num_records, num_records + num_new):
            streams.send_batch(index)
        num_records += num_new

        def others_run(num_checks: int = num_checks_of_others, num_records: int = num_records) -> bool:
            for worker in range(1, num_workers):
                for checks in (num_checks, 10**6):  # a killed worker is restarted
                    with living(checks):
                        streams.run_other(worker)
            return streams.batches.next_offset() == num_records

        with living(num_checks):
            streams.worker_0().run(others_run)
            assert streams.batches.next_offset() == num_records
        assert streams.batches.next_offset() <= num_records
        if num_records:
            (last,) = streams.groups.read(num_records - 1)
            assert last.actor_state == chosen(num_records - 1).actor_state, "the actor could not resume"
    assert streams.built() == in_process(num_records)
    assert all(batch.metrics[CLOCK] > 0 for batch in streams.batches.read(0, 100))
    assert len(streams.groups.read(num_records - 1, 100)) == 1


def test_groups_are_scored_before_their_batch() -> None:
    streams, sent = Streams(), chosen(0)
    loop = streams.worker_0()
    for each in sent.groups:
        streams.send(each)
    loop.run(times(len(sent.groups)))
    scored = streams.reference.num_scored
    assert scored > 0
    assert streams.batches.next_offset() == 0
    streams.groups.append(sent)
    loop.run(streams.has_built(1))
    assert streams.reference.num_scored == scored, "the batch was scored again"
    assert streams.built() == in_process(1)


def test_a_group_that_was_generated_again_is_scored_again() -> None:
    streams, sent = Streams(), chosen(0)
    loop = streams.worker_0()
    for each in sent.groups:
        others = [replace(member, segments=[Segment.given([51]), *member.segments[1:]]) for member in each.rollouts]
        streams.send(replace(each, rollouts=others))
    loop.run(times(len(sent.groups)))
    scored = streams.reference.num_scored
    assert scored > 0
    streams.groups.append(sent)
    loop.run(streams.has_built(1))
    assert streams.reference.num_scored == 2 * scored
    assert streams.built() == in_process(1)


def test_a_batch_waits_for_groups_of_another_worker() -> None:
    streams = Streams(2)
    streams.send_batch(0)
    streams.worker_0().run(times(3))
    assert streams.batches.next_offset() == 0, "worker 1 has a group of the batch"
    streams.run_other(1)
    streams.build(1)
    assert streams.built() == in_process(1)


def test_groups_that_no_batch_trains_on_are_not_scored() -> None:
    streams = Streams()
    loop = streams.worker_0()
    streams.send_batch(0)
    loop.run(streams.has_built(1))
    scored = streams.reference.num_scored
    loop.run(times(SEND_CAPACITY + 1))  # the groups of batch 0 are still in the stream
    assert streams.unscored[0].next_offset() == SEND_CAPACITY
    with pytest.raises(StreamError, match="was trimmed"):
        streams.unscored[0].read(SEND_CAPACITY - 1)
    assert streams.reference.num_scored == scored


def test_a_full_stream_delays_no_rollout() -> None:
    streams = Streams()
    for index in range(3):
        streams.send_batch(index)
    assert streams.unscored[0].next_offset() == SEND_CAPACITY
    streams.build(3)
    assert streams.built() == in_process(3)


def test_records_with_a_finished_batch_are_trimmed() -> None:
    streams = Streams()
    for index in range(5):
        streams.send_batch(index)
    streams.build(3)
    assert [record.index for record in streams.groups.read(2, 100)] == [2, 3, 4]
    with pytest.raises(StreamError, match="offset 1 was trimmed"):
        streams.groups.read(1)
    assert [batch.index for batch in streams.batches.read(0, 100)] == [0, 1, 2]


def test_stop_request_ends_the_wait_for_room() -> None:
    streams = Streams(capacity=1)
    batches = streams.batches
    for index in range(3):
        streams.send_batch(index)
    should_stop = threading.Event()
    thread = threading.Thread(target=streams.worker_0().run, args=(should_stop.is_set,))
    thread.start()
    try:
        assert [batch.index for batch in batches.read(0, timeout_s=10)] == [0]
        assert [batch.index for batch in batches.read(1, timeout_s=10)] == [1]
    finally:
        should_stop.set()
        thread.join(10)
    assert not thread.is_alive()
    assert batches.next_offset() == 2, "the stream holds more records than its capacity"
    assert batches.read(2, timeout_s=0) == []
    streams.build(3)
    assert streams.built() == in_process(3)


def test_batch_has_scores_and_actor_state() -> None:
    streams = Streams()
    streams.send_batch(0)
    streams.build(1)
    (batch,) = streams.batches.read(0)
    assert batch.actor_state == chosen(0).actor_state
    assert batch.metrics["in_flight"] == 0.0
    assert batch.group_ids == [0, 1]
    for microbatch in batch.microbatches[0]:
        expected = CountingReference().logprobs(microbatch)
        np.testing.assert_array_equal(present(microbatch.ref_logprobs), expected)
