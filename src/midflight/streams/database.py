"""A SQLite file that belongs to a run: of one kind and schema, in WAL mode, its errors one clear line."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from midflight.errors import StreamError
from midflight.streams.codec import SCHEMA_VERSION, check_schema

_BUSY_TIMEOUT_S = 30.0  # transactions take microseconds; a lock held for this long is held by a stopped process


class Database:
    """The file at `path`, created with these tables if there is none or it is empty.

    `kind` says what it is, `application_id` tells it from any other SQLite file. Losing power may lose the last
    commits: they go to the operating system at once but to the disk at WAL checkpoints only, because waiting for the
    disk would cost milliseconds each.
    Raises: StreamError if the file is something else, which stays as it is, or was written with another schema.
    Not: shared between threads; each opens its own.
    """

    def __init__(self, path: Path, kind: str, application_id: int, tables: Sequence[str]) -> None:
        self._path = path
        with self.errors(), _locked(path.parent):
            self._connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
            try:
                self._prepare(kind, application_id, tables)
            except BaseException:
                self._connection.close()
                raise
        self.execute, self.executemany = self._connection.execute, self._connection.executemany

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits at the end, or rolls back; takes the write lock at once, as upgrading a read lock can fail."""
        with self.errors(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def errors(self, *others: type[Exception]) -> Iterator[None]:
        """Raises: StreamError that names the file, for what SQLite or the system raises within, and for the others."""
        kinds: tuple[type[Exception], ...] = (sqlite3.Error, OSError, *others)
        try:
            yield
        except kinds as error:
            raise StreamError(f"{self._path}: {error}") from error

    def close(self) -> None:
        self._connection.close()

    def _prepare(self, kind: str, application_id: int, tables: Sequence[str]) -> None:
        self._connection.execute("PRAGMA synchronous = NORMAL")
        with self.transaction():
            if not self._pragma("application_id") and not self._pragma("schema_version"):
                for statement in (
                    f"PRAGMA application_id = {application_id}",
                    f"PRAGMA user_version = {SCHEMA_VERSION}",
                    *tables,
                ):
                    self._connection.execute(statement)
            if self._pragma("application_id") != application_id:
                raise StreamError(f"{self._path} is a SQLite database but not {kind}")
            check_schema(self._pragma("user_version"), f"{self._path} was ")
        # The file remembers this mode. Before the check it would change a file that is not ours.
        self._connection.execute("PRAGMA journal_mode = WAL")

    def _pragma(self, name: str) -> int:
        value: int = self._connection.execute(f"PRAGMA {name}").fetchone()[0]
        return value


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time: SQLite does not wait for another that is just switching a new file to WAL mode."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
