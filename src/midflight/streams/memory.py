"""A stream between two threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from midflight.concurrency.wake_up import deadline_after
from midflight.errors import StreamError

Record = TypeVar("Record")


class MemoryStream(Generic[Record]):
    """A stream of the records themselves, not copies: a record must not be changed after `append`.

    Invariants: any number of threads may use the stream at once; `close` ends every wait with a StreamError.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.capacity = capacity
        self._changed = threading.Condition()
        self._records: list[Record] = []
        self._first_offset = 0  # of self._records[0]
        self._read_offset = 0
        self._closed = False

    def append(self, record: Record, timeout_s: float | None = None) -> int | None:
        offsets = self.append_many([record], timeout_s)
        return offsets[0] if offsets else None

    def append_many(self, records: Sequence[Record], timeout_s: float | None = None) -> list[int]:
        deadline_s = deadline_after(timeout_s)
        offsets: list[int] = []
        with self._changed:
            while len(offsets) < len(records):
                left_s = None if timeout_s is None else deadline_s - time.monotonic()
                self._changed.wait_for(lambda: self._closed or self._num_free() > 0, left_s)
                self._check_open()
                new = records[len(offsets) : len(offsets) + self._num_free()]
                if not new:
                    break
                offsets += range(self._end(), self._end() + len(new))
                self._records += new
                self._changed.notify_all()
        return offsets

    def read(self, from_offset: int, max_records: int = 1, timeout_s: float | None = None) -> list[Record]:
        with self._changed:
            self._check_open()
            self._acknowledge(from_offset)
            self._changed.wait_for(lambda: self._closed or self._end() > from_offset, timeout_s)
            self._check_open()
            if from_offset < self._first_offset:
                raise StreamError(f"offset {from_offset} was trimmed; the stream starts at {self._first_offset}")
            start = from_offset - self._first_offset
            return self._records[start : start + max_records]

    def trim(self, before_offset: int) -> None:
        with self._changed:
            self._check_open()
            before_offset = min(before_offset, self._end())
            if before_offset > self._first_offset:
                del self._records[: before_offset - self._first_offset]
                self._first_offset = before_offset
            self._read_offset = max(self._read_offset, before_offset)
            self._changed.notify_all()

    def skip_to(self, offset: int) -> None:
        with self._changed:
            self._check_open()
            self._records.clear()
            self._first_offset = self._read_offset = offset
            self._changed.notify_all()

    def next_offset(self) -> int:
        with self._changed:
            self._check_open()
            return self._end()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _acknowledge(self, from_offset: int) -> None:
        if from_offset > self._end():
            raise StreamError(f"offset {from_offset} is past the end of the stream, {self._end()}")
        if from_offset > self._read_offset:
            self._read_offset = from_offset
            self._changed.notify_all()

    def _end(self) -> int:
        return self._first_offset + len(self._records)

    def _num_free(self) -> int:
        return self._read_offset + self.capacity - self._end()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamError("the stream is closed")
