"""Conversion of span files to one Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from midflight.tracing.reading import read_lines


def write_chrome_trace(span_files: Sequence[Path], out: Path) -> None:
    """Write every span as a complete event under its process and thread, in the order of the files.

    Spans of one machine since its last boot share a clock; machines are aligned by the wall clock. An incomplete last
    line, left by a killed process, is skipped. Files are read twice, so that memory does not grow with their length.
    Units: times in microseconds since the earliest span.
    """
    earliest_ns = min((span["ts"] for span in _events(span_files) if span["ph"] == "X"), default=0)
    with out.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents": [')
        for index, event in enumerate(_events(span_files)):
            if event["ph"] == "X":
                event["ts"] = (event["ts"] - earliest_ns) / 1e3
            file.write(", " * (index > 0) + json.dumps(event))
        file.write("]}")


def _events(span_files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the names of processes and threads, and every span; times `ts` are nanoseconds of the wall clock."""
    clock_offsets: dict[str, int] = {}
    for path in span_files:
        header: dict[str, Any] = {}
        for line in read_lines(path):
            if isinstance(line, dict):
                header = line
                clock_offsets.setdefault(header["clock"], header["unix_minus_monotonic_ns"])
                yield from _names(header)
                continue
            name, start_ns, end_ns, *arguments = line
            yield {
                "name": name,
                "ph": "X",
                "pid": header["pid"],
                "tid": header["pid"],
                "ts": start_ns + clock_offsets[header["clock"]],
                "dur": (end_ns - start_ns) / 1e3,
                "args": arguments[0] if arguments else {},
            }


def _names(header: dict[str, Any]) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": header["pid"], "tid": header["pid"]}
    return [
        {**common, "name": "process_name", "args": {"name": header["process"]}},
        {**common, "name": "thread_name", "args": {"name": header["thread"]}},
    ]
