"""Reading of span files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midflight.tracing.spans import SpanRecord


def read_spans(path: Path) -> list[SpanRecord]:
    """Return the spans of a file, sorted by start. Raises: OSError if the file cannot be read."""
    spans = [
        (line[0], line[1], line[2], line[3] if len(line) > 3 else {})
        for line in read_lines(path)
        if isinstance(line, list)
    ]
    return sorted(spans, key=lambda span: span[1])


def read_lines(path: Path) -> Iterator[Any]:
    """Yield headers and spans in file order. An incomplete line, left by a killed process, is skipped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue
