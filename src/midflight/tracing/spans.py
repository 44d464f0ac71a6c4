"""Spans: named time intervals of a thread, in a file and as running totals.

Times are `time.monotonic_ns`, one clock for all processes of a host. A span file is JSON lines: a header object with
process and thread (another one after each restart), then one array `[name, start_ns, end_ns]` per span. A fourth entry
holds the arguments of the span, if there are any.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import time
from collections import defaultdict
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import Any

SpanRecord = tuple[str, int, int, dict[str, Any]]

logger = logging.getLogger(__name__)


class Tracer:
    """Recorder of the spans of one thread; every thread has its own tracer and its own file.

    Spans of a thread nest or follow one another. After `max_spans` spans, or after the first write error, spans only
    count in the totals: a failed trace must not end a run. Without a path there are only totals.
    """

    def __init__(
        self,
        path: Path | None,
        process_name: str,
        thread_name: str = "main",
        flush_every: int = 256,
        max_spans: int = 500_000,
    ) -> None:
        self._totals_ns: defaultdict[str, int] = defaultdict(int)
        self._buffer: list[SpanRecord] = []
        self._flush_every = flush_every
        self._num_left = max_spans if path else 0
        self._file = None
        if path:
            self._file = path.open("a", encoding="utf-8")
            # The line break ends an incomplete line that a killed process may have left; readers skip empty lines.
            self._file.write("\n" + json.dumps(_header(process_name, thread_name)) + "\n")

    def span(self, name: str, **args: Any) -> Span:
        """Record the duration of a `with` block, however it ends: `with tracer.span("decode"):`."""
        return Span(self, name, args)

    def add(self, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Record a span with given times of `time.monotonic_ns`."""
        self._totals_ns[name] += end_ns - start_ns
        if self._num_left:
            buffer = self._buffer
            buffer.append((name, start_ns, end_ns, args))
            if len(buffer) >= self._flush_every:
                self.flush()

    def total_s(self, name: str) -> float:
        """Total duration of the ended spans of this name (seconds)."""
        return self._totals_ns.get(name, 0) / 1e9

    def flush(self) -> None:
        """Write the recorded spans; the file then holds every span so far."""
        if self._file is None:
            return
        spans = self._buffer[: self._num_left]
        self._num_left -= len(spans)
        self._buffer.clear()
        try:
            self._file.write("".join([_line(*span) for span in spans]))
            self._file.flush()
        except OSError as error:
            logger.warning("no more spans are written to the trace: %s", error)
            self._stop_writing()

    def close(self) -> None:
        """Write the remaining spans. Totals stay readable, and later spans only count in the totals."""
        self.flush()
        self._stop_writing()

    def _stop_writing(self) -> None:
        self._num_left = 0
        if self._file is not None:
            # After a full disk, the file's buffer still holds the spans: closing tries to write them again.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Span:
    """One use of `Tracer.span`."""

    __slots__ = ("_args", "_name", "_start_ns", "_tracer")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]) -> None:
        self._tracer = tracer
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        self._start_ns = monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._tracer.add(self._name, self._start_ns, monotonic_ns(), **self._args)


def _line(name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> str:
    # Formatting by hand takes a fifth of the time of json.dumps on the whole record.
    if args:
        values = ",".join([f"{_quoted(key)}:{_plain(value)}" for key, value in args.items()])
        return f"[{_quoted(name)},{start_ns},{end_ns},{{{values}}}]\n"
    return f"[{_quoted(name)},{start_ns},{end_ns}]\n"


def _plain(value: Any) -> Any:
    return value if type(value) is int else json.dumps(value)


@functools.cache
def _quoted(name: str) -> str:
    return json.dumps(name)


def _header(process_name: str, thread_name: str) -> dict[str, Any]:
    return {
        "process": process_name,
        "thread": thread_name,
        "pid": os.getpid(),
        "clock": _clock_id(),
        "unix_minus_monotonic_ns": time.time_ns() - monotonic_ns(),
    }


def _clock_id() -> str:
    """Identifier of a monotonic clock: one boot of one host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
