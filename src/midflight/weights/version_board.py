"""The newest published version in a mapped file, with wake-ups: for transports whose tensors go another way.

sender                              rollout process
publish   waits for: nothing        newest_version   waits for: nothing
                                    wait             waits for: a newer version, PATH.sent
                                                     unblocked by: publish
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from midflight.concurrency.wake_up import WakeUp
from midflight.errors import WeightUpdateError


class VersionBoard:
    """Both ends of the board; any number of processes may read one path. Implements PublishedVersions.

    Raises: WeightUpdateError if the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, unless another process has: no version is published then."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(fd, mmap.PAGESIZE)
                # One aligned word, which every core reads and writes atomically: version + 1, or 0.
                self._word = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")[:1]
            finally:
                os.close(fd)
        except OSError as error:
            raise WeightUpdateError(f"{path}: cannot share the newest version: {error.strerror}") from error
        self._published = open_wake_up(path)

    def publish(self, version: int) -> None:
        """Make this version the newest, also if it is lower than the last one."""
        self._word[0] = version + 1
        self._published.notify()

    def newest_version(self) -> int | None:
        return self._word[0] - 1 if self._word[0] else None

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        return wait_for_newer(self.newest_version, lambda: self._published, newer_than, timeout_s)

    def close(self) -> None:
        """Close the board. The file stays for the other processes."""
        self._word.release()
        self._published.close()


def wait_for_newer(
    newest_version: Callable[[], int | None], published: Callable[[], WakeUp], newer_than: int, timeout_s: float
) -> bool:
    """Wait until `newest_version()` is above `newer_than`; return False after the timeout.

    `published()` is asked for after each look: a look may replace the FIFO.
    """
    deadline_s = time.monotonic() + timeout_s
    while (version := newest_version()) is None or version <= newer_than:
        if not published().wait(deadline_s):
            return False
    return True


def wake_up_path(path: Path) -> Path:
    return path.with_name(path.name + ".sent")


def open_wake_up(path: Path) -> WakeUp:
    """Open the FIFO beside `path`. Raises: WeightUpdateError if there is another kind of file."""
    try:
        return WakeUp(wake_up_path(path))
    except OSError as error:
        raise WeightUpdateError(f"cannot open the wake-up FIFO {wake_up_path(path)}: {error.strerror}") from error
