"""metrics.jsonl: one JSON object per optimizer step, written after each step and readable during the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from midflight.errors import RunDirectoryError

MetricsLine = dict[str, Any]

_MAX_READ_BYTES = 1 << 20  # of a tail at once: a long run has more metrics than its supervisor may hold


class JsonlWriter:
    """Appends one JSON object per line and flushes it, so a killed process leaves at most an incomplete last line.

    A run that resumes at step v passes `resume_version=v`. The writer then removes an incomplete last line and the
    lines of later versions, whose steps are repeated. Without `resume_version` the file must not exist.

    Raises: FileExistsError; RunDirectoryError if a line to keep is damaged.
    """

    def __init__(self, path: Path, resume_version: int | None = None) -> None:
        if resume_version is not None and path.exists():
            _truncate(path, resume_version)
        self._file = path.open("x" if resume_version is None else "a", encoding="utf-8")

    def write(self, line: Mapping[str, object]) -> None:
        """Append one line. Numbers that are not finite become null."""
        self._file.write(json.dumps(finite(line), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[MetricsLine]:
    """Return all complete lines; an incomplete last line is left out, because its writer is still busy or was killed.

    Raises: RunDirectoryError if a complete line is not a JSON object; OSError if the file cannot be read.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[MetricsLine]:
    """Yield the lines of `read_metrics` one by one. Raises as `read_metrics` does."""
    with path.open("rb") as file:
        for line in file:
            yield from _parse(path, line)


class MetricsTail:
    """Reader that follows a growing metrics file.

    A resumed run truncates the file. The tail then reads the file again from its start, so versions may repeat: a line
    replaces earlier lines of the same and later versions.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last_line = b""  # ends at `_offset`; if it is gone, the file was truncated

    def read(self) -> list[MetricsLine]:
        """Return the next complete lines; [] if there are none yet, or no file. Raises as `read_metrics` does.

        The lines of one call have about 1 MiB, so there may be more.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            file.seek(self._offset - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                self._offset, self._last_line = 0, b""
            file.seek(self._offset)
            content = file.read(_MAX_READ_BYTES)
            new = _complete(content) or _complete(content + file.readline())
        if new:
            self._offset += len(new)
            self._last_line = new.splitlines(keepends=True)[-1]
        return _parse(self._path, new)


def _truncate(path: Path, version: int) -> None:
    num_kept_bytes = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n") or _parse(path, line)[0].get("version", 0) > version:
                break
            num_kept_bytes += len(line)
        file.truncate(num_kept_bytes)


def _complete(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _parse(path: Path, content: bytes) -> list[MetricsLine]:
    lines = []
    for line in _complete(content).splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise RunDirectoryError(f"{path} is damaged: this line is not a JSON object: {line[:60]!r}")
        lines.append(values)
    return lines


def json_text(value: object) -> str:
    """Indented JSON of a result, for people and programs; numbers that are not finite become null."""
    return json.dumps(finite(value), indent=2, allow_nan=False)


def finite(value: object) -> object:
    """Replace numbers that are not finite by None at any depth, so that every JSON reader understands the result."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
