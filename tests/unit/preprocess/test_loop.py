"""The preprocessing loop builds every batch once, despite kills, and equal to the batches built in process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.errors import StreamError
from midflight.preprocess.advantages import group_mean
from midflight.preprocess.batches import Preprocessing
from midflight.preprocess.loop import PreprocessAtOnce, PreprocessLoop, Preprocessor
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


class HalfProbabilityReference:
    """Reference that gives every token half the probability of the behavior policy."""

    def logprobs(self, microbatch: Microbatch) -> Float32Array:
        return np.where(microbatch.loss_mask, microbatch.behavior_logprobs - np.log(2), 0).astype(np.float32)


PREPROCESSING = Preprocessing(group_mean, max_tokens=64, max_response_tokens=20, reference=HalfProbabilityReference())


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

    life = Life(10**9)

    def append(self, record: Record, timeout_s: float | None = None) -> int | None:
        return self._checked(lambda: super(KillingStream, self).append(record, timeout_s))

    def read(self, from_offset: int, max_records: int = 1, timeout_s: float | None = None) -> list[Record]:
        return self._checked(lambda: super(KillingStream, self).read(from_offset, max_records, timeout_s=0))

    def trim(self, before_offset: int) -> None:
        self._checked(lambda: super(KillingStream, self).trim(before_offset))

    def _checked(self, operation: Callable[[], T]) -> T:
        self.life.check()
        result = operation()
        self.life.check()
        return result


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


def in_process(num_batches: int) -> list[bytes]:
    batches: MemoryStream[TrainingBatch] = MemoryStream(capacity=100)
    sink = PreprocessAtOnce(batches, Preprocessor(PREPROCESSING, Tracer(None, "test")))
    assert [sink.append(chosen(index)) for index in range(num_batches)] == list(range(num_batches))
    return [message(batch) for batch in batches.read(0, 100)]


def loop_between(groups: MemoryStream[ChosenBatch], batches: MemoryStream[TrainingBatch]) -> PreprocessLoop:
    tracer = Tracer(None, "test")
    return PreprocessLoop(groups, batches, Preprocessor(PREPROCESSING, tracer), tracer)


def has_reached(stream: MemoryStream[TrainingBatch], offset: int) -> bool:
    return stream.next_offset() == offset


lives = st.tuples(
    st.integers(0, 3), st.integers(0, 25)
)  # new records before the process starts, checks until it is killed


@pytest.mark.slow
@given(st.lists(lives, max_size=12))
def test_each_batch_is_built_once_despite_kills(lives: list[tuple[int, int]]) -> None:
    groups: KillingStream[ChosenBatch] = KillingStream(capacity=100)
    batches: KillingStream[TrainingBatch] = KillingStream(capacity=100)
    codec = Codec(ChosenBatch)
    num_records = 0
    for num_new, num_checks in [*lives, (1, 10**6)]:
        groups.life = batches.life = Life(10**6)
        for index in range(num_records, num_records + num_new):
            groups.append(codec.decode(codec.encode(chosen(index))))
        num_records += num_new
        groups.life = batches.life = Life(num_checks)
        with contextlib.suppress(KilledError):
            loop_between(groups, batches).run(partial(has_reached, batches, num_records))
            assert batches.next_offset() == num_records
        groups.life = batches.life = Life(10**6)
        assert batches.next_offset() <= num_records
        if num_records:
            (last,) = groups.read(num_records - 1)
            assert last.actor_state == chosen(num_records - 1).actor_state, "the actor could not resume"
    built = batches.read(0, 100)
    assert [message(batch) for batch in built] == in_process(num_records)
    assert all(batch.metrics[CLOCK] > 0 for batch in built)
    assert len(groups.read(num_records - 1, 100)) == 1


def test_records_with_a_finished_batch_are_trimmed() -> None:
    groups: MemoryStream[ChosenBatch] = MemoryStream(capacity=100)
    batches: MemoryStream[TrainingBatch] = MemoryStream(capacity=100)
    for index in range(5):
        groups.append(chosen(index))
    loop_between(groups, batches).run(lambda: batches.next_offset() == 3)
    assert [record.index for record in groups.read(2, 100)] == [2, 3, 4]
    with pytest.raises(StreamError, match="offset 1 was trimmed"):
        groups.read(1)
    assert [batch.index for batch in batches.read(0, 100)] == [0, 1, 2]


def test_stop_request_ends_the_wait_for_room() -> None:
    groups: MemoryStream[ChosenBatch] = MemoryStream(capacity=100)
    batches: MemoryStream[TrainingBatch] = MemoryStream(capacity=1)
    for index in range(3):
        groups.append(chosen(index))
    should_stop = threading.Event()
    thread = threading.Thread(target=loop_between(groups, batches).run, args=(should_stop.is_set,))
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
    loop_between(groups, batches).run(lambda: batches.next_offset() == 3)
    assert [message(batch) for batch in batches.read(0, 3)] == in_process(3)


def test_batch_has_reference_logprobs_and_actor_state() -> None:
    groups: MemoryStream[ChosenBatch] = MemoryStream(capacity=1)
    batches: MemoryStream[TrainingBatch] = MemoryStream(capacity=1)
    groups.append(chosen(0))
    loop_between(groups, batches).run(lambda: batches.next_offset() == 1)
    (batch,) = batches.read(0)
    assert batch.actor_state == chosen(0).actor_state
    assert batch.metrics["in_flight"] == 0.0
    assert batch.group_ids == [0, 1]
    for microbatch in batch.microbatches[0]:
        ratio = np.exp(present(microbatch.ref_logprobs) - microbatch.behavior_logprobs)[microbatch.loss_mask]
        np.testing.assert_allclose(ratio, 0.5, rtol=1e-6)
