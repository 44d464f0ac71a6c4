"""SQLite streams survive processes that are killed at random points or run out of disk.

Run as `test_sqlite_stream_kill.py append|take|fill PATH`, this file is the process that a test kills. It prints every
offset that it has appended or taken.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import midflight
from midflight.errors import StreamError
from midflight.streams.sqlite import SqliteStream
from midflight.types import GeneratedTokens

TIMEOUT_S = 60.0
NUM_TOKENS = 2000  # 24 kB per record: SQLite writes back its log every 170 records
CAPACITY = 1_000_000


def record(offset: int) -> GeneratedTokens:
    tokens = np.arange(offset, offset + NUM_TOKENS, dtype=np.int32)
    return GeneratedTokens(tokens, -tokens.astype(np.float32), np.full(NUM_TOKENS, offset, np.int32))


def is_record(offset: int, found: GeneratedTokens) -> bool:
    expected = record(offset)
    return all(
        np.array_equal(getattr(expected, name), getattr(found, name))
        for name in ("token_ids", "logprobs", "weight_versions")
    )


def open_stream(path: Path) -> SqliteStream[GeneratedTokens]:
    return SqliteStream(path, GeneratedTokens, CAPACITY)


def start(role: str, path: Path, *arguments: object) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(Path(midflight.__file__).parents[1])}
    command = [sys.executable, __file__, role, str(path), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


def killed_after(process: subprocess.Popen[bytes], num_lines: int, delay_s: float) -> list[int]:
    """Kill a process shortly after `num_lines` reported offsets, and return all reported offsets."""
    assert process.stdout is not None
    with process:
        offsets = [int(process.stdout.readline()) for _ in range(num_lines)]
        time.sleep(delay_s)  # not a wait for anything: without it every kill would directly follow a report
        process.kill()
        return offsets + [int(line) for line in process.stdout if line.endswith(b"\n")]


@pytest.mark.slow
def test_a_killed_writer_leaves_all_acknowledged_records(tmp_path: Path) -> None:
    path = tmp_path / "stream.sqlite"
    chance = random.Random(1)
    num_records = 0
    for _ in range(10):
        process = start("append", path)
        acknowledged = killed_after(process, chance.randint(1, 250), delay_s=chance.uniform(0, 0.005))
        assert acknowledged == list(range(num_records, num_records + len(acknowledged)))
        with closing(open_stream(path)) as stream:
            end = stream.next_offset()
            assert num_records + len(acknowledged) <= end <= num_records + len(acknowledged) + 1
            found = stream.read(num_records, CAPACITY)
            assert [is_record(num_records + index, each) for index, each in enumerate(found)] == [True] * len(found)
            assert num_records + len(found) == end
        num_records = end


@pytest.mark.slow
def test_a_killed_reader_keeps_untrimmed_records(tmp_path: Path) -> None:
    path = tmp_path / "stream.sqlite"
    chance = random.Random(2)
    num_records = 800
    with closing(open_stream(path)) as stream:
        for offset in range(num_records):
            stream.append(record(offset))
    last = 0
    for _ in range(6):
        process = start("take", path, last)
        taken = killed_after(process, chance.randint(1, 80), delay_s=chance.uniform(0, 0.005))
        assert taken == list(range(last, last + len(taken)))
        last = taken[-1]
        with closing(open_stream(path)) as stream:
            found = stream.read(last, CAPACITY)
            assert [is_record(last + index, each) for index, each in enumerate(found)] == [True] * (num_records - last)


def test_a_full_disk_leaves_the_stream_readable(tmp_path: Path) -> None:
    path = tmp_path / "stream.sqlite"
    with start("fill", path) as process:
        assert process.stdout is not None
        lines = process.stdout.read().decode().splitlines()
    assert process.returncode == 0
    *offsets, error, still_readable = lines
    assert len(offsets) > 10
    assert error.startswith(f"{path}: "), error
    assert still_readable == f"{len(offsets)} read"
    with closing(open_stream(path)) as stream:
        assert stream.append(record(len(offsets))) == len(offsets), "the stream accepts records again"
        assert len(stream.read(0, CAPACITY)) == len(offsets) + 1


def append(stream: SqliteStream[GeneratedTokens]) -> None:
    offset = stream.next_offset()
    while True:
        print(stream.append(record(offset)), flush=True)
        offset += 1


def take(stream: SqliteStream[GeneratedTokens], offset: int) -> None:
    """Read from `offset` on, and trim every record before the reported one."""
    while stream.read(offset, timeout_s=0):
        print(offset, flush=True)
        stream.trim(offset)
        offset += 1


def fill(stream: SqliteStream[GeneratedTokens]) -> None:
    """Append until files cannot grow, as on a full disk; then read all records back."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
    offset = 0
    try:
        while True:
            stream.append(record(offset))
            print(offset)
            offset += 1
    except StreamError as error:
        print(error)
    num_read = 0
    while num_read < offset and is_record(num_read, stream.read(num_read, timeout_s=0)[0]):
        num_read += 1
    print(num_read, "read", flush=True)


def main(role: str, path: str, offset: str = "0") -> None:
    stream = open_stream(Path(path))
    match role:
        case "append":
            append(stream)
        case "take":
            take(stream, int(offset))
        case "fill":
            fill(stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
