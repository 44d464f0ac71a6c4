"""Combination of metric sinks: metrics.jsonl, which every run needs, and optional sinks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from midflight.protocols import MetricsSink


class MetricsSinks:
    """Metrics sink that passes every line on to several sinks.

    Raises: the errors of the first sink. If an optional sink raises, the user is told and the sink gets no more lines.
    """

    def __init__(
        self,
        first: MetricsSink,
        others: Sequence[tuple[str, Callable[[], MetricsSink]]],
        note: Callable[[str], object],
    ) -> None:
        """`others`: pairs of a name for messages and a constructor."""
        self._first, self._note = first, note
        self._others: list[tuple[str, MetricsSink]] = []
        for name, constructor in others:
            with self._noted(name):
                self._others.append((name, constructor()))

    def write(self, line: Mapping[str, Any]) -> None:
        self._first.write(line)
        for name, sink in list(self._others):
            with self._noted(name):
                sink.write(line)
                continue
            self._others.remove((name, sink))
            with self._noted(name):
                sink.close()

    def close(self) -> None:
        self._first.close()
        for name, sink in self._others:
            with self._noted(name):
                sink.close()

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """Report an error to the user and continue."""
        try:
            yield
        except Exception as error:
            self._note(f"metrics sink {name} failed and gets no more lines: {type(error).__name__}: {error}")
