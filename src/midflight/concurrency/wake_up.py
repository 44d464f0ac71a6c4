"""How one process wakes another that waits for something in a file they share, without anyone polling."""

from __future__ import annotations

import errno
import math
import os
import select
import stat
import time
from contextlib import suppress
from pathlib import Path

WAIT_SLICE_S = 0.2  # a loop that waits looks so often whether it was asked to stop
_RELOOK_S = 0.2  # nobody waits longer than this without looking again, so a lost ring costs latency and nothing else


def deadline_after(timeout_s: float | None) -> float:
    """The time of `time.monotonic()` until which to wait; None waits for ever. Units: seconds."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


class WakeUp:
    """A named FIFO: one side rings, another waits. A ring means "look again"; it may be stale or lost, never relied on.

    A notification wakes one of several waiters; the others look again on their own.
    Raises: OSError if there is something else at `path`, or no FIFO can be made there.
    """

    def __init__(self, path: Path) -> None:
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Open for both directions: opening never waits for the other side, and its death is no end of file.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            self.close()
            raise FileExistsError(errno.EEXIST, "not a FIFO, and in the way of one", str(path))
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def notify(self) -> None:
        with suppress(BlockingIOError):  # full of rings nobody waited for: one more says nothing new
            os.write(self._fd, b"!")

    def wait(self, deadline_s: float) -> bool:
        """Wait for a ring, but not for long: look again if True. False, at once, if the deadline has passed.

        Units: `deadline_s` is a time of `time.monotonic()`, in seconds.
        """
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        if self._poll.poll(1000 * min(left_s, _RELOOK_S)):
            with suppress(BlockingIOError):  # another that waits took it first
                os.read(self._fd, 1 << 16)
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
