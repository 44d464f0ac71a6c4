"""Records per second through each stream, from one process to another, and the growth of memory.

The writer appends a batch of records at once. The reader takes up to a hundred at a time and trims what it has read.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.redis_server import RedisServer
from midflight.errors import RecipeError, WorkerError
from midflight.protocols import Stream
from midflight.report.machine import describe_machine
from midflight.streams.redis import RedisStream
from midflight.streams.sqlite import SqliteStream
from midflight.types import Problem

KINDS = ("sqlite", "redis")
_CAPACITY = 1024
_READ_AT_ONCE = 100
_TIMEOUT_S = 60.0
_WARM_UP = 1000  # records


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """Load of `num_records` of `record_bytes` each; one measurement per entry of `batches`, the records per append."""

    num_records: int
    record_bytes: int
    batches: tuple[int, ...]
    redis_url: str | None = None  # None: the benchmark starts a server

    def record(self, index: int) -> Problem:
        return Problem(str(index), "x" * self.record_bytes, "")


def bench_streams(kinds: tuple[str, ...], load: StreamLoad, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure all streams; return a row per kind and batch.

    Units: `records_per_s`; `*_growth_mib`, growth of a process's peak memory over the whole run.
    Raises: RecipeError if a kind does not exist or no Redis is found; WorkerError if the writer fails.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise RecipeError(f"--streams: there is no {unknown[0]!r}; known are {', '.join(KINDS)}")
    rows = []
    for kind, batch in itertools.product(kinds, load.batches):
        with tempfile.TemporaryDirectory() as directory, _place(kind, Path(directory), load) as (where, server):
            row: dict[str, Any] = {"stream": kind, "batch": batch, **_measure(kind, where, load, batch)}
            if server:
                row["server_peak_mib"] = server.peak_memory_bytes() / 2**20
        rows.append(row)
        report(f"{kind}, {batch} at once: {row['records_per_s']:,.0f} records/s")
    return {
        "machine": describe_machine(),
        "records": load.num_records,
        "record_bytes": load.record_bytes,
        "capacity": _CAPACITY,
        "rows": rows,
    }


def _measure(kind: str, where: str, load: StreamLoad, batch: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write, args=(kind, where, load, batch, theirs))
    stream = _open(kind, where)
    writer.start()
    try:
        _read(stream, 0, _WARM_UP)
        started, before_mib = time.perf_counter(), _memory_mib()
        _read(stream, _WARM_UP, load.num_records)
        seconds = time.perf_counter() - started
        if not ours.poll(_TIMEOUT_S):
            raise WorkerError(f"the writing process did not report within {_TIMEOUT_S:g} s")
        writer_mib = ours.recv()
    finally:
        writer.terminate()
        writer.join()
        if isinstance(stream, RedisStream):
            stream.remove()
        stream.close()
    return {
        "records_per_s": load.num_records / seconds,
        "reader_growth_mib": _memory_mib() - before_mib,
        "writer_growth_mib": writer_mib,
    }


def _read(stream: Stream[Problem], start: int, count: int) -> None:
    offset = start
    while offset < start + count:
        most = min(_READ_AT_ONCE, start + count - offset)
        records = stream.read(offset, most, _TIMEOUT_S)
        if not records:
            raise WorkerError(f"no record arrived within {_TIMEOUT_S:g} s; the writing process may have failed")
        assert records[0].problem_id == str(offset), "records come in order"
        offset += len(records)
        stream.trim(offset)


def _write(kind: str, where: str, load: StreamLoad, batch: int, reader: Connection) -> None:
    stream = _open(kind, where)
    _append(stream, load, range(_WARM_UP), batch)
    before_mib = _memory_mib()
    _append(stream, load, range(_WARM_UP, _WARM_UP + load.num_records), batch)
    reader.send(_memory_mib() - before_mib)
    stream.close()


def _append(stream: Stream[Problem], load: StreamLoad, indices: range, batch: int) -> None:
    for start in range(0, len(indices), batch):
        stream.append_many([load.record(index) for index in indices[start : start + batch]])


def _open(kind: str, where: str) -> Stream[Problem]:
    if kind == "redis":
        return RedisStream(where, "midflight:bench", Problem, _CAPACITY)
    return SqliteStream(Path(where), Problem, _CAPACITY)


@contextlib.contextmanager
def _place(kind: str, directory: Path, load: StreamLoad) -> Iterator[tuple[str, RedisServer | None]]:
    """Provide the path or URL of a stream, and the server if the benchmark started it."""
    if kind == "sqlite":
        yield str(directory / "stream.sqlite"), None
    elif load.redis_url:
        yield load.redis_url, None
    else:
        try:
            server = RedisServer(directory)
            server.start()
        except FileNotFoundError as error:
            raise RecipeError(f"--redis-url: {error}") from error
        try:
            yield server.url, server
        finally:
            server.kill()


def _memory_mib() -> float:
    """Peak memory of this process (MiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
