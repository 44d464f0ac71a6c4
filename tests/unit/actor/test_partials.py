"""The partial-rollout buffer: `load` returns one whole save, also after a killed process or a full disk.

As a program, this file saves until it is killed or files reach a size limit: `test_partials.py save|fill PATH`.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import midflight
from midflight.actor.partials import PartialBuffer, segments_from
from midflight.errors import StreamError
from midflight.types import (
    ActorState,
    FinishReason,
    GeneratedTokens,
    GroupId,
    Rollout,
    RolloutId,
    RolloutStatus,
    Segment,
)

GROUP_SIZE = 4


def tokens(rollout_id: int, length: int) -> GeneratedTokens:
    """First `length` tokens of this rollout, always the same ones."""
    token_ids = np.arange(length, dtype=np.int32) + 1000 * rollout_id
    return GeneratedTokens(token_ids, -token_ids.astype(np.float32) / np.float32(7), token_ids // 10)


def rollout(
    rollout_id: int, length: int = 0, status: RolloutStatus = RolloutStatus.RUNNING, **fields: object
) -> Rollout:
    prompt = Segment.given(range(rollout_id % 5))
    segments = [prompt, Segment(tokens(rollout_id, length))] if length else [prompt]
    group_id = GroupId(rollout_id // GROUP_SIZE)
    return Rollout(RolloutId(rollout_id), group_id, status, segments, **fields)  # type: ignore[arg-type]


def tokens_of(item: Rollout, start: int) -> list[Segment]:
    return segments_from(item.segments[1:], start)


def save(buffer: PartialBuffer, rollouts: Sequence[Rollout], **state: object) -> None:
    buffer.save(ActorState(**state), rollouts, tokens_of)  # type: ignore[arg-type]


def loaded(path: Path) -> tuple[ActorState, dict[int, Rollout]]:
    """Load the buffer with a new object, as another process would."""
    with closing(PartialBuffer(path)) as buffer:
        checkpoint = buffer.load()
    assert checkpoint
    return checkpoint.state, {item.rollout_id: item for item in checkpoint.rollouts}


def assert_same(found: Rollout, expected: Rollout) -> None:
    for name in ("token_ids", "logprobs", "weight_versions"):
        left, right = getattr(found.generated, name), getattr(expected.generated, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    assert not len(found.prompt_token_ids), "prompts follow from the group and are not saved"
    for name in ("group_id", "status", "finish_reason", "reward", "reward_components", "failure", "num_carried"):
        assert getattr(found, name) == getattr(expected, name), name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "partials.sqlite"


def test_empty_buffer_loads_nothing(path: Path) -> None:
    with closing(PartialBuffer(path)) as buffer:
        assert buffer.load() is None
    with closing(PartialBuffer(path)) as buffer:
        assert buffer.load() is None


def test_loaded_rollouts_are_the_saved_ones(path: Path) -> None:
    partial = rollout(1, 7, RolloutStatus.PARTIAL, num_carried=5)
    untouched = rollout(2, 0, RolloutStatus.PARTIAL)
    finished = rollout(
        3, 9, RolloutStatus.FINISHED, finish_reason=FinishReason.STOP, reward=0.25, reward_components={"accuracy": 0.5}
    )
    ungraded = rollout(4, 4, finish_reason=FinishReason.LENGTH)
    failed = rollout(5, 3, RolloutStatus.FAILED, finish_reason=FinishReason.STOP, failure="ValueError: no")
    state = ActorState(
        next_group_id=GroupId(2),
        open_group_ids=[GroupId(0), GroupId(1)],
        num_batches=3,
        num_failed_groups=1,
        generated_tokens=29,
        generated_lengths=[4, 9],
        dropped_lengths=[2],
    )
    with closing(PartialBuffer(path)) as buffer:
        buffer.save(state, [rollout(0, 6), partial, untouched, finished, ungraded, failed], tokens_of)
    found_state, found = loaded(path)
    assert found_state == state
    assert_same(found[0], replace(rollout(0, 6), status=RolloutStatus.PARTIAL))
    for expected in (partial, untouched, finished, ungraded, failed):
        assert_same(found[expected.rollout_id], expected)


def test_tokens_of_many_saves_are_joined(path: Path) -> None:
    starts: list[int] = []

    def new_tokens(item: Rollout, start: int) -> list[Segment]:
        starts.append(start)
        return tokens_of(item, start)

    with closing(PartialBuffer(path)) as buffer:
        for length in (0, 1, 1, 5, 17):
            buffer.save(ActorState(), [rollout(0, length)], new_tokens)
        buffer.save(ActorState(), [rollout(0, 20, finish_reason=FinishReason.STOP)], new_tokens)
        graded = rollout(0, 20, RolloutStatus.FINISHED, finish_reason=FinishReason.STOP, reward=1.0)
        buffer.save(ActorState(), [graded], new_tokens)
    assert starts == [0, 0, 1, 1, 5, 17, 20], "each token is written once"
    assert_same(loaded(path)[1][0], graded)


def test_loaded_turns_are_the_saved_ones(path: Path) -> None:
    turns = [Segment.given(()), Segment(tokens(0, 4)), Segment.given([7, 8]), Segment(tokens(1, 3))]
    with closing(PartialBuffer(path)) as buffer:
        for num_segments in (1, 2, 3, 4):
            save(buffer, [Rollout(RolloutId(0), GroupId(0), RolloutStatus.PARTIAL, turns[:num_segments])])
            found = loaded(path)[1][0]
            expected = [segment.sampled for segment in turns[:num_segments]]
            assert [segment.sampled for segment in found.segments] == expected
            for name in ("token_ids", "logprobs", "weight_versions"):
                for one, other in zip(found.segments, turns, strict=False):
                    np.testing.assert_array_equal(getattr(one.tokens, name), getattr(other.tokens, name))


def test_closed_rollouts_are_deleted_with_their_tokens(path: Path) -> None:
    with closing(PartialBuffer(path)) as buffer:
        save(buffer, [rollout(index, 5) for index in range(8)], num_batches=1)
        save(buffer, [rollout(index, 6) for index in range(4, 8)], num_batches=2)
        assert {row[0] for row in buffer._db.execute("SELECT DISTINCT rollout_id FROM tokens")} == {4, 5, 6, 7}
        save(buffer, [], num_batches=3)
        assert buffer._db.execute("SELECT count(*) FROM tokens").fetchone() == (0,)
    state, rollouts = loaded(path)
    assert state.num_batches == 3
    assert rollouts == {}


@pytest.mark.parametrize("num_saves", [1, 3])
def test_first_save_replaces_saves_of_earlier_processes(path: Path, num_saves: int) -> None:
    """A first save without rollouts counts, too: a rollout that begins again later must not get its old tokens."""
    with closing(PartialBuffer(path)) as buffer:
        save(buffer, [rollout(0, 50), rollout(9, 50)], num_batches=1)
    with closing(PartialBuffer(path)) as buffer:
        for _ in range(num_saves):
            save(buffer, [], num_batches=1)
        save(buffer, [rollout(0, 2)], num_batches=1)
        save(buffer, [rollout(0, 3)], num_batches=1)
    _, rollouts = loaded(path)
    assert list(rollouts) == [0]
    assert len(rollouts[0].generated) == 3


def test_failed_save_changes_nothing_and_the_next_works(path: Path) -> None:
    def broken(item: Rollout, start: int) -> list[Segment]:
        if item.rollout_id == 1:
            raise KeyError("it has just ended")
        return tokens_of(item, start)

    with closing(PartialBuffer(path)) as buffer:
        save(buffer, [rollout(0, 2), rollout(1, 2)], num_batches=1)
        with pytest.raises(KeyError):
            buffer.save(ActorState(num_batches=2), [rollout(0, 9), rollout(1, 9)], broken)
        state, rollouts = loaded(path)
        assert state.num_batches == 1
        assert len(rollouts[0].generated) == 2
        save(buffer, [rollout(0, 9), rollout(1, 9)], num_batches=2)
    assert_same(loaded(path)[1][1], replace(rollout(1, 9), status=RolloutStatus.PARTIAL))


@pytest.mark.slow
def test_file_size_does_not_grow_with_the_number_of_saves(path: Path) -> None:
    """Save eight rollouts of up to 200 tokens 3000 times."""

    def size() -> int:
        return sum(file.stat().st_size for file in path.parent.iterdir())

    def in_flight(at: int) -> list[Rollout]:
        return [rollout(lane + 8 * ((at + 25 * lane) // 200), (at + 25 * lane) % 200) for lane in range(8)]

    with closing(PartialBuffer(path)) as buffer:
        for at in range(1000):
            save(buffer, in_flight(at))
        size_then = size()
        for at in range(1000, 3000):
            save(buffer, in_flight(at))
        assert size() <= 1.5 * size_then
        assert len(loaded(path)[1]) == 8


def test_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to be looked at\n" * 100)
    with pytest.raises(StreamError, match=f"{path}: file is not a database"):
        PartialBuffer(path)


def test_damaged_record_is_an_error(path: Path) -> None:
    with closing(PartialBuffer(path)) as buffer:
        save(buffer, [rollout(0, 5)])
        buffer._db.execute("UPDATE rollouts SET status = 'asleep'")
        with pytest.raises(StreamError, match=str(path)):
            buffer.load()


def test_damaged_tokens_are_an_error(path: Path) -> None:
    with closing(PartialBuffer(path)) as buffer:
        save(buffer, [rollout(0, 5)])
        (piece,) = buffer._db.execute("SELECT piece FROM tokens").fetchone()
        flipped = piece[:-2] + bytes([piece[-2] ^ 1]) + piece[-1:]
        for damaged in (piece[:-4], flipped):
            buffer._db.execute("UPDATE tokens SET piece = ?", (damaged,))
            with pytest.raises(StreamError, match=f"{path}: damaged tokens of rollout 0"):
                buffer.load()


def test_missing_piece_is_an_error(path: Path) -> None:
    with closing(PartialBuffer(path)) as buffer:
        for length in (5, 9, 12):
            save(buffer, [rollout(0, length)])
        buffer._db.execute("DELETE FROM tokens WHERE start = 5")
        with pytest.raises(StreamError, match=f"{path}: rollout 0 lacks tokens before its token 9"):
            buffer.load()


# --- killed, or out of disk -------------------------------------------------------------------------------------


def consistent(path: Path) -> int:
    """Return the number of the loaded save; every part of the file must belong to this save."""
    state, rollouts = loaded(path)
    step = state.num_updates
    assert state.generated_tokens == sum(len(item.generated) for item in rollouts.values())
    assert [*rollouts] == [item.rollout_id for item in rollouts_at(step)]
    for expected in rollouts_at(step):
        assert_same(rollouts[expected.rollout_id], replace(expected, status=RolloutStatus.PARTIAL))
    return step


def rollouts_at(step: int) -> list[Rollout]:
    """Rollouts of save number `step`: 16 at a time, each for 40 saves, with 5 more tokens in each save."""
    lanes = [(lane, step + 3 * lane) for lane in range(16)]
    return sorted((rollout(lane + 16 * (at // 40), 5 * (at % 40)) for lane, at in lanes), key=lambda r: r.rollout_id)


def save_for_ever(buffer: PartialBuffer) -> None:
    checkpoint = buffer.load()
    step = checkpoint.state.num_updates if checkpoint else 0
    while True:
        step += 1
        rollouts = rollouts_at(step)
        generated = sum(len(item.generated) for item in rollouts)
        save(buffer, rollouts, num_updates=step, generated_tokens=generated)
        print(step, flush=True)


def start(role: str, path: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(Path(midflight.__file__).parents[1])}
    return subprocess.Popen([sys.executable, __file__, role, str(path)], env=environment, stdout=subprocess.PIPE)


@pytest.mark.slow
def test_killed_process_leaves_its_last_save_or_the_next(path: Path) -> None:
    chance = random.Random(3)
    for _ in range(4):
        with start("save", path) as process:
            assert process.stdout
            reported = [int(process.stdout.readline()) for _ in range(chance.randint(1, 150))]
            time.sleep(chance.uniform(0, 0.005))  # not a wait: without it, every kill comes just after a report
            process.kill()
            reported += [int(line) for line in process.stdout if line.endswith(b"\n")]
        assert consistent(path) - reported[-1] in (0, 1)


def test_full_disk_is_one_line_and_keeps_the_last_save(path: Path) -> None:
    with start("fill", path) as process:
        assert process.stdout
        *steps, error = process.stdout.read().decode().splitlines()
    assert process.returncode == 0
    assert error.startswith(f"{path}: "), error
    assert consistent(path) == int(steps[-1])
    with closing(PartialBuffer(path)) as buffer:  # there is room again
        rollouts = rollouts_at(7)
        save(buffer, rollouts, num_updates=7, generated_tokens=sum(len(item.generated) for item in rollouts))
    assert consistent(path) == 7


def main(role: str, path: str) -> None:
    if role == "fill":
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    try:
        save_for_ever(PartialBuffer(Path(path)))
    except StreamError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
