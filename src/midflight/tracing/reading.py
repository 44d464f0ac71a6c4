"""What was recorded, read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midflight.tracing.spans import SpanRecord


def read_spans(path: Path) -> list[SpanRecord]:
    """The spans of a file, by their starts. Raises: OSError if it cannot be read."""
    spans = [
        (line[0], line[1], line[2], line[3] if len(line) > 3 else {})
        for line in lines_of(path)
        if isinstance(line, list)
    ]
    return sorted(spans, key=lambda span: span[1])


def lines_of(path: Path) -> Iterator[Any]:
    """Headers and spans of a file as they stand there. A torn line, left by a killed process, is skipped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue
