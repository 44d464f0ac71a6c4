"""News of the members of a pool, so that the pool looks at the members that have some, and not at all of them.

consumes       notifications of the members' threads
waits for      a notification
unblocked by   any member
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial


class News:
    """Names of members with something new: a completion, an error, another weight version. One thread reads them."""

    def __init__(self) -> None:
        self._names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def notifier(self, name: str) -> Callable[[], object]:
        """Return the function with which this member notifies, from any thread."""
        return partial(self._names.put, name)

    def take(self, timeout_s: float = 0.0) -> set[str]:
        """Return the names since the last call; wait up to `timeout_s` for the first one."""
        names = set()
        try:
            names.add(self._names.get(timeout=timeout_s) if timeout_s else self._names.get_nowait())
            while True:
                names.add(self._names.get_nowait())
        except queue.Empty:
            return names
