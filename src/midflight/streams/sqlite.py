"""A stream in a SQLite file, between processes of one machine that may be killed at any time.

    writer                                                        reader
    append   consumes: records                                    read   consumes: records in the file
             waits for: room, PATH.room                                  waits for: a record, PATH.appended
             unblocked by: read, trim                                    unblocked by: append

Every change is one transaction in WAL mode, so a killed process leaves the stream as it was before or after the change.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

from midflight.concurrency.wake_up import WakeUp, deadline_after
from midflight.errors import StreamError
from midflight.streams.codec import Codec
from midflight.streams.database import Database

Record = TypeVar("Record")

_APPLICATION_ID = 0x4D464C54  # "MFLT"
_TABLES = (
    "CREATE TABLE stream (record_type TEXT, next_offset INTEGER, read_offset INTEGER)",
    "CREATE TABLE records (offset INTEGER PRIMARY KEY, message BLOB NOT NULL)",
)


class SqliteStream(Generic[Record]):
    """The stream at `path`, created if it does not exist. Every process opens the same path.

    Invariants: an offset that `append` returned is readable until it is trimmed, whichever process is killed; a power
    failure may lose the last records.
    Raises: StreamError if the file holds no stream of such records, or cannot be written; with a full disk, the stream
    stays readable.
    Not: shared between threads; each thread opens its own.
    """

    def __init__(self, path: Path, record_type: type[Record], capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._path = path
        self.capacity = capacity
        self._codec = Codec(record_type)
        self._acknowledged = 0  # the read position that this reader last wrote to the file
        self._db = Database(path, "a stream", _APPLICATION_ID, _TABLES)
        try:
            self._check(record_type.__name__)
            with self._db.errors():
                self._appended = WakeUp(path.with_name(path.name + ".appended"))
                self._room = WakeUp(path.with_name(path.name + ".room"))
        except BaseException:
            self._db.close()
            raise

    def append(self, record: Record, timeout_s: float | None = None) -> int | None:
        offsets = self.append_many([record], timeout_s)
        return offsets[0] if offsets else None

    def append_many(self, records: Sequence[Record], timeout_s: float | None = None) -> list[int]:
        messages = [self._codec.encode(record) for record in records]
        deadline_s = deadline_after(timeout_s)
        offsets: list[int] = []
        while len(offsets) < len(messages):
            if new := self._insert(messages[len(offsets) :]):
                offsets += new
                self._appended.notify()
            elif not self._room.wait(deadline_s):
                break
        return offsets

    def read(self, from_offset: int, max_records: int = 1, timeout_s: float | None = None) -> list[Record]:
        deadline_s = deadline_after(timeout_s)
        while not (rows := self._select(from_offset, max_records)):
            if not self._appended.wait(deadline_s):
                return []
        return [self._decode(offset, message) for offset, message in rows]

    def trim(self, before_offset: int) -> None:
        with self._db.transaction():
            self._db.execute("DELETE FROM records WHERE offset < ?", (before_offset,))
            self._db.execute("UPDATE stream SET read_offset = max(read_offset, min(next_offset, ?))", (before_offset,))
        self._room.notify()

    def skip_to(self, offset: int) -> None:
        with self._db.transaction():
            self._db.execute("DELETE FROM records")
            self._db.execute("UPDATE stream SET next_offset = ?1, read_offset = ?1", (offset,))
        self._room.notify()

    def next_offset(self) -> int:
        with self._db.errors():
            offset: int = self._db.execute("SELECT next_offset FROM stream").fetchone()[0]
            return offset

    def close(self) -> None:
        self._db.close()
        self._appended.close()
        self._room.close()

    def _check(self, record_type: str) -> None:
        with self._db.transaction():
            row = self._db.execute("SELECT record_type FROM stream").fetchone()
            if row is None:
                self._db.execute("INSERT INTO stream VALUES (?, 0, 0)", (record_type,))
            elif row[0] != record_type:
                raise StreamError(f"{self._path} is a stream of {row[0]}, not of {record_type}")

    def _insert(self, messages: Sequence[bytes]) -> range:
        """Append as many messages as there is room for; return their offsets."""
        with self._db.transaction():
            start, read_offset = self._db.execute("SELECT next_offset, read_offset FROM stream").fetchone()
            offsets = range(start, min(start + len(messages), max(start, read_offset + self.capacity)))
            if offsets:
                self._db.executemany("INSERT INTO records VALUES (?, ?)", zip(offsets, messages, strict=False))
                self._db.execute("UPDATE stream SET next_offset = ?", (offsets.stop,))
        return offsets

    def _select(self, from_offset: int, max_records: int) -> list[tuple[int, bytes]]:
        end = self.next_offset()  # read first: a record appended in between must not be taken for a trimmed one
        if from_offset > end:
            raise StreamError(f"{self._path}: offset {from_offset} is past the end of the stream, {end}")
        with self._db.errors():
            self._acknowledge(from_offset)
            rows = self._db.execute(
                "SELECT offset, message FROM records WHERE offset >= ? ORDER BY offset LIMIT ?",
                (from_offset, max_records),
            ).fetchall()
        start = rows[0][0] if rows else end
        if from_offset < start:
            raise StreamError(f"{self._path}: offset {from_offset} was trimmed; the stream starts at {start}")
        return rows

    def _acknowledge(self, from_offset: int) -> None:
        """Move the read position up to `from_offset`, unless it is there already or the disk is full."""
        if from_offset <= self._acknowledged:
            return
        try:
            self._db.execute("UPDATE stream SET read_offset = ?1 WHERE read_offset < ?1", (from_offset,))
        except sqlite3.OperationalError as error:
            # A full disk must not stop the reader; the wait or the next read tries again.
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                raise
        else:
            self._acknowledged = from_offset
            self._room.notify()

    def _decode(self, offset: int, message: bytes) -> Record:
        try:
            return self._codec.decode(message)
        except StreamError as error:
            raise StreamError(f"{self._path}: record {offset}: {error}") from error
