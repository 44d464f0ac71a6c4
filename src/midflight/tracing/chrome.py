"""Conversion of span files to one Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midflight.tracing.reading import read_lines


def write_chrome_trace(span_files: Sequence[Path], out: Path) -> None:
    """Write every span as a complete event under its process and thread.

    Spans of one machine since its last boot share a clock; machines are aligned by the wall clock. An incomplete last
    line, left by a killed process, is skipped.
    Units: times in microseconds since the earliest span.
    """
    spans: list[dict[str, Any]] = []
    names: list[dict[str, Any]] = []
    clock_offsets: dict[str, int] = {}
    for path in span_files:
        header: dict[str, Any] = {}
        for line in read_lines(path):
            if isinstance(line, dict):
                header = line
                clock_offsets.setdefault(header["clock"], header["unix_minus_monotonic_ns"])
                names += _names(header)
                continue
            name, start_ns, end_ns, *arguments = line
            spans.append(
                {
                    "name": name,
                    "ph": "X",
                    "pid": header["pid"],
                    "tid": header["pid"],
                    "ts": start_ns + clock_offsets[header["clock"]],
                    "dur": (end_ns - start_ns) / 1e3,
                    "args": arguments[0] if arguments else {},
                }
            )
    earliest = min((span["ts"] for span in spans), default=0)
    for span in spans:
        span["ts"] = (span["ts"] - earliest) / 1e3
    out.write_text(json.dumps({"traceEvents": [*names, *sorted(spans, key=lambda span: span["ts"])]}))


def _names(header: dict[str, Any]) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": header["pid"], "tid": header["pid"]}
    return [
        {**common, "name": "process_name", "args": {"name": header["process"]}},
        {**common, "name": "thread_name", "args": {"name": header["thread"]}},
    ]
