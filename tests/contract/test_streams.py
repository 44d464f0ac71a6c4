"""Contract of every stream, then the additional guarantees of SQLite and Redis.

Run as a program, this file is the other process of a test: `test_streams.py write|read PATH CAPACITY NUM_RECORDS`, or
`test_streams.py batches WHERE BATCH`, which writes until it is killed.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.redis_server import RedisServer

import midflight
from midflight.concurrency import wake_up
from midflight.errors import StreamError
from midflight.protocols import Stream
from midflight.streams import redis as redis_stream
from midflight.streams.codec import SCHEMA_VERSION
from midflight.streams.memory import MemoryStream
from midflight.streams.redis import RedisStream
from midflight.streams.sqlite import SqliteStream
from midflight.types import Grade, Problem

TIMEOUT_S = 60.0


def problem(index: int) -> Problem:
    return Problem(f"problem-{index}", "1+1=" * (index % 7), "2")


def problems(indices: range) -> list[Problem]:
    return [problem(index) for index in indices]


def append_all(stream: Stream[Problem], num_records: int) -> None:
    for _ in range(num_records):
        assert stream.append(problem(stream.next_offset()), TIMEOUT_S) is not None


def read_all(stream: Stream[Problem], num_records: int, max_records: int = 1) -> list[Problem]:
    records: list[Problem] = []
    while len(records) < num_records:
        new = stream.read(len(records), max_records, TIMEOUT_S)
        assert new, "no record arrived"
        records += new
    return records


@dataclass
class Ends:
    """Two ends of one stream: the handle of the test thread, and a function that opens a handle for another thread."""

    stream: Stream[Problem]
    open_other: Callable[[], AbstractContextManager[Stream[Problem]]]

    def append_all(self, num_records: int) -> None:
        with self.open_other() as stream:
            append_all(stream, num_records)

    def append(self, index: int) -> int | None:
        with self.open_other() as stream:
            return stream.append(problem(index), TIMEOUT_S)

    def append_many(self, indices: range) -> list[int]:
        with self.open_other() as stream:
            return stream.append_many(problems(indices), TIMEOUT_S)

    def read(self, from_offset: int) -> list[Problem]:
        with self.open_other() as stream:
            return stream.read(from_offset, timeout_s=TIMEOUT_S)


def open_sqlite(path: Path, capacity: int = 100) -> SqliteStream[Problem]:
    return SqliteStream(path, Problem, capacity)


def ends_in_file(path: Path, capacity: int) -> Ends:
    return Ends(open_sqlite(path, capacity), lambda: closing(open_sqlite(path, capacity)))


def open_redis(url: str, name: str, capacity: int = 100, **options: Any) -> RedisStream[Problem]:
    return RedisStream(url, name, Problem, capacity, **options)


def open_anywhere(where: str) -> Stream[Problem]:
    """Open a stream by its path or URL."""
    return open_redis(where, "killed") if where.startswith("redis:") else open_sqlite(Path(where))


@pytest.fixture(params=["memory", "sqlite", "redis"])
def ends_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Ends]]:
    """Return a function from a capacity to both ends of a stream."""
    with ExitStack() as open_streams:

        def in_memory(capacity: int) -> Ends:
            stream: Stream[Problem] = MemoryStream(capacity)
            return Ends(stream, lambda: nullcontext(stream))

        def in_file(capacity: int) -> Ends:
            ends = ends_in_file(tmp_path / "stream.sqlite", capacity)
            open_streams.enter_context(closing(ends.stream))
            return ends

        def in_redis(capacity: int) -> Ends:
            url, name = request.getfixturevalue("redis_server").url, tmp_path.name
            ends = Ends(open_redis(url, name, capacity), lambda: closing(open_redis(url, name, capacity)))
            open_streams.enter_context(closing(ends.stream))
            return ends

        yield {"memory": in_memory, "sqlite": in_file, "redis": in_redis}[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stream.sqlite"


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor


@pytest.fixture
def wake_up_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the periodic check: a wait without a notification never ends."""
    monkeypatch.setattr(wake_up, "_RELOOK_S", 1e6)


def test_records_come_back_in_order_at_their_offsets(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(100).stream
    assert stream.next_offset() == 0
    assert [stream.append(problem(index)) for index in range(10)] == list(range(10))
    assert stream.next_offset() == 10
    assert stream.read(0, 4) == [problem(index) for index in range(4)]
    assert stream.read(4, 99) == [problem(index) for index in range(4, 10)]
    assert stream.read(2) == [problem(2)]


def test_reading_keeps_records(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(100).stream
    append_all(stream, 5)
    assert read_all(stream, 5) == read_all(stream, 5, max_records=3) == [problem(index) for index in range(5)]


def test_read_returns_nothing_after_timeout(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(1).stream
    assert stream.read(0, timeout_s=0) == []
    assert stream.read(0, timeout_s=0.01) == []
    append_all(stream, 1)
    assert stream.read(1, timeout_s=0.01) == []


def test_append_returns_none_after_timeout_when_full(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(3).stream
    append_all(stream, 3)
    assert stream.append(problem(3), timeout_s=0) is None
    assert stream.append(problem(3), timeout_s=0.01) is None
    assert stream.next_offset() == 3
    assert stream.read(0, 10) == [problem(index) for index in range(3)]


def test_append_many_keeps_the_order(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(100).stream
    assert stream.append_many([]) == []
    assert stream.append_many(problems(range(4))) == [0, 1, 2, 3]
    assert stream.append(problem(4)) == 4
    assert stream.append_many(problems(range(5, 9))) == [5, 6, 7, 8]
    assert stream.read(0, 99) == problems(range(9))


def test_append_many_appends_what_fits(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(3).stream
    assert stream.append_many(problems(range(5)), timeout_s=0) == [0, 1, 2]
    assert stream.append_many(problems(range(3, 5)), timeout_s=0) == []
    assert stream.append_many(problems(range(3, 5)), timeout_s=0.01) == []
    stream.read(1)
    assert stream.append_many(problems(range(3, 5)), timeout_s=0.01) == [3]
    assert stream.next_offset() == 4
    assert stream.read(0, 99) == problems(range(4))


@pytest.mark.usefixtures("wake_up_only")
def test_append_many_waits_for_room(ends_of: Callable[[int], Ends], elsewhere: ThreadPoolExecutor) -> None:
    ends = ends_of(3)
    written = elsewhere.submit(ends.append_many, range(50))
    assert read_all(ends.stream, 50, max_records=2) == problems(range(50))
    assert written.result(TIMEOUT_S) == list(range(50))


@pytest.mark.usefixtures("wake_up_only")
def test_append_many_wakes_a_waiting_reader(ends_of: Callable[[int], Ends], elsewhere: ThreadPoolExecutor) -> None:
    ends = ends_of(9)
    waiting = elsewhere.submit(ends.read, 0)
    ends.stream.append_many(problems(range(5)))
    assert waiting.result(TIMEOUT_S) == [problem(0)]


def test_append_many_with_one_bad_record_appends_nothing(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(9).stream
    if isinstance(stream, MemoryStream):
        pytest.skip("a stream in memory writes nothing")
    with pytest.raises(StreamError, match="cannot write this Problem"):
        stream.append_many([problem(0), Problem(object(), "", "")])  # type: ignore[arg-type]
    assert stream.next_offset() == 0


def test_two_batch_writers_lose_nothing(ends_of: Callable[[int], Ends], elsewhere: ThreadPoolExecutor) -> None:
    ends = ends_of(5)
    with ThreadPoolExecutor(2) as writers:
        written = [writers.submit(ends.append_many, indices) for indices in (range(30), range(100, 130))]
        records = read_all(ends.stream, 60, max_records=3)
        offsets = [each.result(TIMEOUT_S) for each in written]
    assert sorted(offsets[0] + offsets[1]) == list(range(60))
    assert [records[offset] for offset in offsets[0]] == problems(range(30))
    assert [records[offset] for offset in offsets[1]] == problems(range(100, 130))


def test_reading_from_an_offset_releases_earlier_records(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(3).stream
    append_all(stream, 3)
    stream.read(0, 3)
    assert stream.append(problem(3), timeout_s=0) is None, "reading a record does not release it"
    stream.read(2)
    assert stream.append(problem(3), timeout_s=0) == 3
    assert stream.append(problem(4), timeout_s=0) == 4
    assert stream.append(problem(5), timeout_s=0) is None


def test_a_restarted_reader_keeps_released_room(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(2).stream
    append_all(stream, 2)
    stream.read(2, timeout_s=0)
    assert stream.read(0, 9) == [problem(0), problem(1)]
    assert stream.append(problem(2), timeout_s=0) == 2


@pytest.mark.usefixtures("wake_up_only")
def test_room_wakes_a_waiting_writer(ends_of: Callable[[int], Ends], elsewhere: ThreadPoolExecutor) -> None:
    ends = ends_of(1)
    stream = ends.stream
    append_all(stream, 1)
    waiting = elsewhere.submit(ends.append, 1)
    assert read_all(stream, 2) == [problem(0), problem(1)]
    assert waiting.result(TIMEOUT_S) == 1


@pytest.mark.usefixtures("wake_up_only")
def test_a_record_wakes_a_waiting_reader(ends_of: Callable[[int], Ends], elsewhere: ThreadPoolExecutor) -> None:
    ends = ends_of(1)
    waiting = elsewhere.submit(ends.read, 0)
    append_all(ends.stream, 1)
    assert waiting.result(TIMEOUT_S) == [problem(0)]


@pytest.mark.parametrize(("capacity", "max_records"), [(1, 1), (5, 1), (5, 3), (200, 200)])
def test_writer_and_reader_run_concurrently(
    ends_of: Callable[[int], Ends], elsewhere: ThreadPoolExecutor, capacity: int, max_records: int
) -> None:
    ends = ends_of(capacity)
    written = elsewhere.submit(ends.append_all, 200)
    assert read_all(ends.stream, 200, max_records) == [problem(index) for index in range(200)]
    written.result(TIMEOUT_S)


def test_trimming_removes_records_and_keeps_offsets(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(100).stream
    append_all(stream, 6)
    stream.trim(4)
    stream.trim(2)
    assert stream.read(4, 9) == [problem(4), problem(5)]
    for trimmed in (0, 3, -1):
        with pytest.raises(StreamError, match=f"offset {trimmed} was trimmed; the stream starts at 4"):
            stream.read(trimmed)
    stream.trim(99)
    assert stream.next_offset() == 6
    assert stream.read(6, timeout_s=0) == []
    with pytest.raises(StreamError, match="offset 5 was trimmed; the stream starts at 6"):
        stream.read(5, timeout_s=0)
    assert stream.append(problem(6)) == 6
    assert stream.read(6) == [problem(6)]


def test_trimming_unread_records_makes_room(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(2).stream
    append_all(stream, 2)
    stream.trim(1)
    assert stream.append(problem(2), timeout_s=0) == 2
    assert stream.append(problem(3), timeout_s=0) is None
    stream.trim(99)
    assert [stream.append(problem(index), timeout_s=0) for index in (3, 4, 5)] == [3, 4, None]


@pytest.mark.usefixtures("wake_up_only")
def test_trimming_read_records_wakes_a_writer(ends_of: Callable[[int], Ends], elsewhere: ThreadPoolExecutor) -> None:
    ends = ends_of(1)
    written = elsewhere.submit(ends.append_all, 100)
    for offset in range(100):
        assert ends.stream.read(offset, timeout_s=TIMEOUT_S) == [problem(offset)]
        ends.stream.trim(offset + 1)
    written.result(TIMEOUT_S)


def test_skip_to_continues_after_lost_records(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(2).stream
    append_all(stream, 2)
    stream.skip_to(7)
    assert stream.next_offset() == 7
    assert stream.read(7, timeout_s=0) == []
    assert [stream.append(problem(index), timeout_s=0) for index in (7, 8, 9)] == [7, 8, None]
    with pytest.raises(StreamError, match="offset 1 was trimmed; the stream starts at 7"):
        stream.read(1)
    assert stream.read(8, timeout_s=0) == [problem(8)]


def test_an_offset_past_the_end_is_an_error(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(1).stream
    append_all(stream, 1)
    with pytest.raises(StreamError, match="offset 2 is past the end of the stream, 1"):
        stream.read(2, timeout_s=0)
    assert stream.append(problem(1), timeout_s=0) is None, "the failed read released nothing"


def test_a_closed_stream_is_an_error(ends_of: Callable[[int], Ends]) -> None:
    stream = ends_of(1).stream
    stream.close()
    stream.close()
    with pytest.raises(StreamError, match="closed"):
        stream.append(problem(0))
    with pytest.raises(StreamError, match="closed"):
        stream.append_many([problem(0)])
    with pytest.raises(StreamError, match="closed"):
        stream.read(0)
    with pytest.raises(StreamError, match="closed"):
        stream.next_offset()


def test_zero_capacity_is_an_error(ends_of: Callable[[int], Ends]) -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, not 0"):
        ends_of(0)


def test_closing_a_memory_stream_wakes_waiting_threads(elsewhere: ThreadPoolExecutor) -> None:
    stream: MemoryStream[Problem] = MemoryStream(1)
    waiting = elsewhere.submit(lambda: stream.read(0))
    stream.close()
    with pytest.raises(StreamError, match="the stream is closed"):
        waiting.result(TIMEOUT_S)


@contextmanager
def other_process(role: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run this file as another process; kill the process at the end if it still runs."""
    places = (Path(midflight.__file__).parents[1], Path(__file__).parents[2])  # midflight and `benchmarks`
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, __file__, role, *map(str, arguments)]
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_writer_killed_in_append_many_leaves_a_prefix(kind: str, path: Path, request: pytest.FixtureRequest) -> None:
    where = request.getfixturevalue("redis_server").url if kind == "redis" else path
    with closing(open_anywhere(str(where))) as stream:
        for _ in range(2):
            end = stream.next_offset()
            with other_process("batches", where, 40):
                while stream.next_offset() < end + 200:
                    stream.read(stream.next_offset(), timeout_s=TIMEOUT_S)
            found = stream.read(0, 10**6)
            assert len(found) >= end + 200
            assert found == problems(range(len(found)))


# --- SQLite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 7, 1000])
def test_two_processes_exchange_records(path: Path, capacity: int) -> None:
    stream = open_sqlite(path, capacity)
    with other_process("write", path, capacity, 300) as writer:
        assert read_all(stream, 300, max_records=5) == [problem(index) for index in range(300)]
        assert writer.wait(TIMEOUT_S) == 0
    stream.close()


def test_a_reading_process_unblocks_a_writer(path: Path) -> None:
    stream = open_sqlite(path, capacity=2)
    append_all(stream, 2)
    assert stream.append(problem(2), timeout_s=0) is None
    with other_process("read", path, 2, 50) as reader:
        append_all(stream, 48)
        assert reader.wait(TIMEOUT_S) == 0
    stream.close()


@pytest.mark.usefixtures("wake_up_only")
def test_notify_alone_ends_every_wait(path: Path, elsewhere: ThreadPoolExecutor) -> None:
    ends = ends_in_file(path, capacity=1)
    written = elsewhere.submit(ends.append_all, 300)
    read_all(ends.stream, 300)
    written.result(TIMEOUT_S)
    ends.stream.close()


@pytest.mark.usefixtures("wake_up_only")
def test_trimming_alone_wakes_a_writer(
    path: Path, elsewhere: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_no_room = threading.Event()
    wait = wake_up.WakeUp.wait

    def noted_wait(wake: wake_up.WakeUp, deadline_s: float) -> bool:
        found_no_room.set()
        return wait(wake, deadline_s)

    ends = ends_in_file(path, capacity=1)
    append_all(ends.stream, 1)
    monkeypatch.setattr(wake_up.WakeUp, "wait", noted_wait)
    waiting = elsewhere.submit(ends.append, 1)
    assert found_no_room.wait(TIMEOUT_S)
    ends.stream.trim(1)
    assert waiting.result(TIMEOUT_S / 2) == 1
    ends.stream.close()


def test_waits_end_without_notify(path: Path, elsewhere: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_up, "_RELOOK_S", 0.001)
    monkeypatch.setattr(wake_up.WakeUp, "notify", lambda self: None)
    ends = ends_in_file(path, capacity=1)
    written = elsewhere.submit(ends.append_all, 50)
    read_all(ends.stream, 50)
    written.result(TIMEOUT_S)
    ends.stream.close()


def test_a_reopened_stream_continues(path: Path) -> None:
    first = open_sqlite(path, capacity=4)
    append_all(first, 4)
    first.read(2)
    first.trim(1)
    first.close()
    second = open_sqlite(path, capacity=4)
    assert second.next_offset() == 4
    assert second.read(1, 9) == [problem(1), problem(2), problem(3)]
    assert [second.append(problem(index), timeout_s=0) for index in (4, 5, 6)] == [4, 5, None]
    second.trim(99)
    second.close()
    third = open_sqlite(path)
    assert third.next_offset() == 6, "offsets never repeat, even in an empty stream"
    third.close()


def test_threads_can_create_one_stream_concurrently(path: Path) -> None:
    barrier = threading.Barrier(8)

    def open_and_append(index: int) -> int | None:
        barrier.wait(TIMEOUT_S)
        stream = open_sqlite(path)
        offset = stream.append(problem(index))
        stream.close()
        return offset

    with ThreadPoolExecutor(8) as executor:
        assert sorted(executor.map(open_and_append, range(8)), key=str) == list(range(8))


def test_an_empty_file_becomes_a_stream(path: Path) -> None:
    path.touch()
    stream = open_sqlite(path)
    append_all(stream, 1)
    stream.close()


def test_a_file_that_is_no_database_is_refused_and_kept(path: Path) -> None:
    path.write_text("reward,length\n" * 1000)
    with pytest.raises(StreamError, match=r"stream\.sqlite: file is not a database"):
        open_sqlite(path)
    assert path.read_text() == "reward,length\n" * 1000


def test_another_database_is_refused_and_kept(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE stream (a)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(StreamError, match="is a SQLite database but not a stream"):
        open_sqlite(path)
    assert path.read_bytes() == before


def test_a_stream_of_other_records_is_an_error(path: Path) -> None:
    open_sqlite(path).close()
    with pytest.raises(StreamError, match="is a stream of Problem, not of Grade"):
        SqliteStream(path, Grade, 1)


@pytest.mark.parametrize(("schema", "age"), [(SCHEMA_VERSION + 1, "a newer"), (SCHEMA_VERSION - 1, "an older")])
def test_a_stream_of_another_schema_is_an_error(path: Path, schema: int, age: str) -> None:
    open_sqlite(path).close()
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {schema}")
    database.close()
    with pytest.raises(StreamError, match=f"schema {schema} by {age} midflight"):
        open_sqlite(path)


def test_a_damaged_record_is_named(path: Path) -> None:
    stream = open_sqlite(path)
    append_all(stream, 3)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET message = zeroblob(40) WHERE offset = 1")
    database.close()
    assert stream.read(0) == [problem(0)]
    with pytest.raises(StreamError, match=r"stream\.sqlite: record 1: not a readable Problem"):
        stream.read(1)
    assert stream.read(2) == [problem(2)]
    stream.close()


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=r"No such file or directory: .*nowhere"):
        open_sqlite(tmp_path / "nowhere" / "stream.sqlite")


def test_a_file_in_place_of_the_fifo_is_an_error(path: Path) -> None:
    path.with_name("stream.sqlite.appended").write_text("mine")
    with pytest.raises(StreamError, match="not a FIFO, and in the way of one"):
        open_sqlite(path)


# --- Redis ------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """Redis server that a test may kill."""
    with RedisServer(tmp_path) as server:
        yield server


def test_a_restarted_redis_keeps_its_records(own_server: RedisServer) -> None:
    with closing(open_redis(own_server.url, "s")) as stream:
        append_all(stream, 50)
        stream.trim(10)
        own_server.kill()
        own_server.start()
        assert stream.next_offset() == 50
        assert stream.read(10, 99) == [problem(index) for index in range(10, 50)]
        append_all(stream, 3)


@pytest.mark.parametrize("batch", [1, 30])
def test_streams_wait_for_a_restarting_redis(
    own_server: RedisServer, elsewhere: ThreadPoolExecutor, batch: int
) -> None:
    """Kill and restart Redis ten times under a reader and a writer: no record is lost or duplicated."""
    num_records = 2010

    def write() -> None:
        with closing(open_redis(own_server.url, "s", capacity=20)) as stream:
            for start in range(0, num_records, batch):
                indices = range(start, start + batch)
                assert stream.append_many(problems(indices), TIMEOUT_S) == list(indices)

    written = elsewhere.submit(write)
    with closing(open_redis(own_server.url, "s", capacity=20)) as stream:
        records: list[Problem] = []
        next_kill = 100
        while len(records) < num_records:
            records += stream.read(len(records), 7, TIMEOUT_S)
            stream.trim(len(records) - 5)
            if len(records) >= next_kill:
                own_server.kill()
                own_server.start()
                next_kill += 200
    written.result(TIMEOUT_S)
    assert records == [problem(index) for index in range(num_records)]


def test_an_unreachable_redis_is_an_error(own_server: RedisServer) -> None:
    stream = open_redis(own_server.url, "s", patience_s=0.2)
    own_server.kill()
    with pytest.raises(StreamError, match=rf"s in Redis at 127\.0\.0\.1:{own_server.port} cannot be reached: "):
        stream.next_offset()
    with pytest.raises(StreamError, match="cannot be reached"):
        open_redis(own_server.url, "s", patience_s=0.2)
    own_server.start()


def test_redis_password(tmp_path: Path) -> None:
    with RedisServer(tmp_path, password="open sesame") as server:
        with pytest.raises(StreamError, match="asks for a password"):
            open_redis(server.url, "s")
        for_strangers = server.url.replace("://", "://:wrong@")
        with pytest.raises(StreamError, match="asks for a password, or another one") as raised:
            open_redis(for_strangers, "s")
        assert "wrong" not in str(raised.value)
        with closing(open_redis(server.url.replace("://", "://:open%20sesame@"), "s")) as stream:
            append_all(stream, 1)


def test_a_stream_lost_by_redis_is_an_error(own_server: RedisServer) -> None:
    stream = open_redis(own_server.url, "s")
    append_all(stream, 2)
    stream._client.flushall()
    with pytest.raises(StreamError, match="is gone; Redis keeps it over a restart with `appendonly yes`"):
        stream.append(problem(2))
    with closing(open_redis(own_server.url, "s")) as another:
        append_all(another, 1)
        with pytest.raises(StreamError, match="is gone"):
            stream.read(0)
    stream.close()


def lose_next_answer(stream: RedisStream[Problem], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Let the next append reach Redis and lose its answer; call `meanwhile` before the retry."""
    append = stream._scripts[redis_stream._APPEND]

    def lost(**arguments: Any) -> Any:
        append(**arguments)
        stream._scripts[redis_stream._APPEND] = append
        meanwhile()
        raise stream._redis.exceptions.ConnectionError("the connection was cut")

    stream._scripts[redis_stream._APPEND] = lost


def test_an_append_with_a_lost_answer_happens_once(redis_server: RedisServer, tmp_path: Path) -> None:
    with closing(open_redis(redis_server.url, tmp_path.name)) as stream:
        lose_next_answer(stream)
        assert stream.append(problem(0)) == 0
        assert stream.append(problem(1)) == 1
        lose_next_answer(stream)
        assert stream.append_many(problems(range(2, 9))) == list(range(2, 9))
        assert stream.read(0, 99) == problems(range(9))


def test_a_partial_append_many_with_a_lost_answer_happens_once(redis_server: RedisServer, tmp_path: Path) -> None:
    with closing(open_redis(redis_server.url, tmp_path.name, capacity=3)) as stream:
        lose_next_answer(stream)
        assert stream.append_many(problems(range(5)), timeout_s=0) == [0, 1, 2]
        stream.read(2)
        lose_next_answer(stream)
        assert stream.append_many(problems(range(3, 6)), timeout_s=0) == [3, 4]
        assert stream.read(0, 99) == problems(range(5))


def test_a_lost_answer_survives_another_writer_and_a_restart(own_server: RedisServer) -> None:
    def restart_and_append() -> None:
        own_server.kill()
        own_server.start()
        with closing(open_redis(own_server.url, "s")) as other:
            assert other.append_many(problems(range(3, 5))) == [3, 4]

    with closing(open_redis(own_server.url, "s")) as stream:
        lose_next_answer(stream, restart_and_append)
        assert stream.append_many(problems(range(3))) == [0, 1, 2]
        assert stream.append(problem(5)) == 5
        assert stream.read(0, 99) == problems(range(6))


def test_append_many_splits_into_bounded_calls(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_stream, "_CALL_BYTES", 300)
    with closing(open_redis(redis_server.url, tmp_path.name)) as stream:
        insert, sizes = stream._insert, []

        def noted_insert(messages: Any) -> range:
            sizes.append(sum(map(len, messages)))
            return insert(messages)

        monkeypatch.setattr(stream, "_insert", noted_insert)
        stream.append_many(problems(range(20)))
        assert len(sizes) > 1
        assert max(sizes) <= 300
        large = Problem("large", "x" * 1000, "")
        assert stream.append_many([large, problem(1)]) == [20, 21]
        assert stream.read(0, 20) == problems(range(20))
        assert stream.read(20, 2) == [large, problem(1)]


def test_a_removed_stream_leaves_no_keys(own_server: RedisServer) -> None:
    with closing(open_redis(own_server.url, "s")) as stream:
        append_all(stream, 3)
        stream.read(2)
        stream.remove()
        assert stream._client.keys() == []
        with pytest.raises(StreamError, match="is gone"):
            stream.append(problem(3))


def test_redis_stream_errors_name_the_cause(redis_server: RedisServer) -> None:
    open_redis(redis_server.url, "kinds").close()
    with pytest.raises(StreamError, match=r"kinds in Redis at .* is a stream of Problem, not of Grade"):
        RedisStream(redis_server.url, "kinds", Grade, 1)
    with closing(open_redis(redis_server.url, "newer")) as stream:
        stream._client.hset(stream._keys[0], "schema", SCHEMA_VERSION + 1)
    with pytest.raises(StreamError, match=f"schema {SCHEMA_VERSION + 1} by a newer midflight"):
        open_redis(redis_server.url, "newer")
    with closing(open_redis(redis_server.url, "damaged")) as stream:
        stream._insert([b"rubbish"])
        with pytest.raises(StreamError, match=r"record 0: not a readable Problem"):
            stream.read(0)
    with pytest.raises(StreamError, match="not a Redis URL"):
        open_redis("http://127.0.0.1", "s")


def write_batches(where: str, batch: str) -> None:
    with closing(open_anywhere(where)) as stream:
        while True:
            start = stream.next_offset()
            stream.append_many(problems(range(start, start + int(batch))))


def pass_on(role: str, path: str, capacity: str, num_records: str) -> None:
    stream = open_sqlite(Path(path), int(capacity))
    if role == "write":
        append_all(stream, int(num_records))
    else:
        assert read_all(stream, int(num_records)) == problems(range(int(num_records)))


if __name__ == "__main__":
    write_batches(*sys.argv[2:]) if sys.argv[1] == "batches" else pass_on(*sys.argv[1:])
