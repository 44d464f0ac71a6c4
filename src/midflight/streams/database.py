"""A SQLite file of a run: of one kind and schema, in WAL mode, with one-line errors."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from midflight.errors import StreamError
from midflight.streams.codec import SCHEMA_VERSION, check_schema

_BUSY_TIMEOUT_S = 30.0  # transactions take microseconds; only a stopped process holds a lock this long


class Database:
    """The SQLite file at `path`, created with these tables if it is missing or empty.

    `kind` names its purpose in errors; `application_id` tells it from other SQLite files. A power failure may lose the
    last commits: the operating system has each commit at once, the disk only at WAL checkpoints. Waiting for the disk
    would cost milliseconds per commit.
    Raises: StreamError if the file is of another kind (and stays unchanged) or was written with another schema.
    Not: shared between threads; each thread opens its own.
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
        """Run a transaction: commit on exit, roll back on an error.

        Takes the write lock at the start, because upgrading a read lock later can fail.
        """
        with self.errors(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def errors(self, *others: type[Exception]) -> Iterator[None]:
        """Turn errors of SQLite and of the system, and `others`, into a StreamError that names the file."""
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
        # After the check: the mode is stored in the file, and a foreign file must stay unchanged.
        self._connection.execute("PRAGMA journal_mode = WAL")

    def _pragma(self, name: str) -> int:
        value: int = self._connection.execute(f"PRAGMA {name}").fetchone()[0]
        return value


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the directory: SQLite does not wait for a process that is switching a new file to WAL mode."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
