"""A stream in a SQLite file, between processes of one machine that may be killed at any moment.

    writer                                                        reader
    append   consumes: records                                    read   consumes: records in the file
             waits for: room, PATH.room                                  waits for: a record, PATH.appended
             unblocked by: read, trim                                    unblocked by: append

Every change is one transaction in WAL mode, so a killed process leaves the stream as it was before or after the change.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from midflight.doorbell import Doorbell, deadline_after
from midflight.errors import StreamError
from midflight.streams.codec import SCHEMA_VERSION, Codec

Record = TypeVar("Record")

_APPLICATION_ID = 0x4D464C54  # "MFLT": tells a stream from any other SQLite file
_BUSY_TIMEOUT_S = 30.0  # transactions take microseconds; a lock held for this long is held by a stopped process


class SqliteStream(Generic[Record]):
    """The stream at `path`, created if there is none; each process opens the same path.

    Invariants: an offset that `append` returned is readable until it is trimmed, whatever is killed. Losing power may
    lose the last records: commits go to the operating system at once but to the disk at WAL checkpoints only, because
    waiting for the disk would cost milliseconds a record.
    Raises: StreamError if the file is no stream of such records, or cannot be written (a full disk); it stays readable.
    Not: shared between threads; each opens its own.
    """

    def __init__(self, path: Path, record_type: type[Record], capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._path = path
        self._capacity = capacity
        self._codec = Codec(record_type)
        self._acknowledged = 0  # the read position this reader has brought the file to
        with self._errors(), _locked(path.parent):
            self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
            try:
                self._prepare(record_type.__name__)
                self._appended = Doorbell(path.with_name(path.name + ".appended"))
                self._room = Doorbell(path.with_name(path.name + ".room"))
            except BaseException:
                self._db.close()
                raise

    def append(self, record: Record, timeout_s: float | None = None) -> int | None:
        message = self._codec.encode(record)
        deadline_s = deadline_after(timeout_s)
        while (offset := self._insert(message)) is None:
            if not self._room.wait(deadline_s):
                return None
        self._appended.ring()
        return offset

    def read(self, from_offset: int, max_records: int = 1, timeout_s: float | None = None) -> list[Record]:
        deadline_s = deadline_after(timeout_s)
        while not (rows := self._select(from_offset, max_records)):
            if not self._appended.wait(deadline_s):
                return []
        return [self._decode(offset, message) for offset, message in rows]

    def trim(self, before_offset: int) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM records WHERE offset < ?", (before_offset,))
            self._db.execute("UPDATE stream SET read_offset = max(read_offset, min(next_offset, ?))", (before_offset,))
        self._room.ring()

    def skip_to(self, offset: int) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM records")
            self._db.execute("UPDATE stream SET next_offset = ?1, read_offset = ?1", (offset,))
        self._room.ring()

    def next_offset(self) -> int:
        with self._errors():
            offset: int = self._db.execute("SELECT next_offset FROM stream").fetchone()[0]
            return offset

    def close(self) -> None:
        self._db.close()
        self._appended.close()
        self._room.close()

    def _prepare(self, record_type: str) -> None:
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self._transaction():
            if self._is_blank():
                self._create(record_type)
            self._check(record_type)
        # The file remembers this mode. Before the check it would change a file that is not ours.
        self._db.execute("PRAGMA journal_mode = WAL")

    def _is_blank(self) -> bool:
        return self._pragma("application_id") == 0 and not self._db.execute("SELECT 1 FROM sqlite_master").fetchone()

    def _create(self, record_type: str) -> None:
        self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._db.execute("CREATE TABLE stream (record_type TEXT, next_offset INTEGER, read_offset INTEGER)")
        self._db.execute("CREATE TABLE records (offset INTEGER PRIMARY KEY, message BLOB NOT NULL)")
        self._db.execute("INSERT INTO stream VALUES (?, 0, 0)", (record_type,))

    def _check(self, record_type: str) -> None:
        if self._pragma("application_id") != _APPLICATION_ID:
            raise StreamError(f"{self._path} is a SQLite database but not a stream")
        schema = self._pragma("user_version")
        if schema > SCHEMA_VERSION:
            raise StreamError(
                f"{self._path} was written with schema {schema} by a newer midflight; this one reads {SCHEMA_VERSION}"
            )
        (found,) = self._db.execute("SELECT record_type FROM stream").fetchone()
        if found != record_type:
            raise StreamError(f"{self._path} is a stream of {found}, not of {record_type}")

    def _pragma(self, name: str) -> int:
        value: int = self._db.execute(f"PRAGMA {name}").fetchone()[0]
        return value

    def _insert(self, message: bytes) -> int | None:
        with self._transaction():
            next_offset, read_offset = self._db.execute("SELECT next_offset, read_offset FROM stream").fetchone()
            if next_offset - read_offset >= self._capacity:
                return None
            self._db.execute("INSERT INTO records VALUES (?, ?)", (next_offset, message))
            self._db.execute("UPDATE stream SET next_offset = ?", (next_offset + 1,))
        return int(next_offset)

    def _select(self, from_offset: int, max_records: int) -> list[tuple[int, bytes]]:
        end = self.next_offset()  # asked first: a record appended meanwhile must not look like a trimmed one
        if from_offset > end:
            raise StreamError(f"{self._path}: offset {from_offset} is past the end of the stream, {end}")
        with self._errors():
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
        """Move the read position up to `from_offset`, if there is anything to move and any disk to note it on."""
        if from_offset <= self._acknowledged:
            return
        try:
            self._db.execute("UPDATE stream SET read_offset = ?1 WHERE read_offset < ?1", (from_offset,))
        except sqlite3.OperationalError as error:
            # A full disk must not keep anyone from reading; the wait, or the next read, tries again.
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                raise
        else:
            self._acknowledged = from_offset
            self._room.ring()

    def _decode(self, offset: int, message: bytes) -> Record:
        try:
            return self._codec.decode(message)
        except StreamError as error:
            raise StreamError(f"{self._path}: record {offset}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commits at the end, or rolls back; takes the write lock at once, as upgrading a read lock can fail."""
        with self._errors(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StreamError(f"{self._path}: {error}") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time: SQLite does not wait for another that is just switching a new file to WAL mode."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
