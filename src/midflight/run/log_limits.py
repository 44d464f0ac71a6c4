"""Logs of a server: to stderr, with a bounded number of lines, whatever clients do."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

_PERIOD_S = 10.0
_LINES_OF_A_KIND, _LINES = 5, 50  # per period
_LONGEST_RECORD = 8000  # characters; a traceback has a few thousand


class LogLimit(logging.Filter):
    """Lets a few records of each kind through per period. The first one of a later period tells how many were left out.

    Records are of one kind if they come from the same place in the code.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._period = -1
        self._counts: dict[tuple[str, int], int] = {}  # of this period
        self._left_out: dict[tuple[str, int], int] = {}
        self._num_lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        period = int(self._clock() // _PERIOD_S)
        if period != self._period:
            self._period, self._num_lines = period, 0
            self._counts.clear()
        kind = (record.pathname, record.lineno)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count > _LINES_OF_A_KIND or self._num_lines >= _LINES:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._num_lines += 1
        num_left_out = self._left_out.pop(kind, 0)
        if num_left_out:
            record.msg = f"{record.getMessage().rstrip()} ({num_left_out} lines like this were left out)"
            record.args = None
        return True


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).rstrip()
        return text if len(text) <= _LONGEST_RECORD else f"{text[:_LONGEST_RECORD]}..."


def limit_logs() -> None:
    """Send the warnings and errors of all libraries to stderr, within the limit."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(LogLimit())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
