"""Wake-ups between processes: one process changes a shared file and notifies another, without polling."""

from __future__ import annotations

import errno
import math
import os
import select
import stat
import time
from contextlib import suppress
from pathlib import Path

WAIT_SLICE_S = 0.2  # interval at which a waiting loop checks for a request to stop
_RELOOK_S = 0.2  # longest wait before the caller checks its condition again: a lost wake-up costs only latency


def deadline_after(timeout_s: float | None) -> float:
    """Deadline of a wait as a time of `time.monotonic()`; infinity for None. Units: seconds."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


class WakeUp:
    """A named FIFO: one process notifies, another waits.

    A notification means "check again". It may be stale or lost, so waiters also check again at intervals. If several
    processes wait, a notification wakes one of them.
    Raises: OSError if `path` is another kind of file, or no FIFO can be created there.
    """

    def __init__(self, path: Path) -> None:
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Opened for reading and writing: opening never waits for the other side, whose death causes no end of file.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            self.close()
            raise FileExistsError(errno.EEXIST, "not a FIFO, and in the way of one", str(path))
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def notify(self) -> None:
        with suppress(BlockingIOError):  # the FIFO is full of unread notifications: one more would add nothing
            os.write(self._fd, b"!")

    def wait(self, deadline_s: float) -> bool:
        """Wait briefly for a notification; return True if the caller should check again, False after the deadline.

        Units: `deadline_s` is a time of `time.monotonic()` (seconds).
        """
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        if self._poll.poll(1000 * min(left_s, _RELOOK_S)):
            with suppress(BlockingIOError):  # another waiting process read it first
                os.read(self._fd, 1 << 16)
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
