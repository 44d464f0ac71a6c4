"""Weights that a server takes itself, such as from files: pulled when a version is asked for that is not here.

consumes       weights of a WeightReceiver, in a thread of its own, while the engine keeps decoding
waits for      the version asked for
unblocked by   the sender; close within WAIT_SLICE_S
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from midflight.concurrency.background import run_in_background
from midflight.concurrency.wake_up import WAIT_SLICE_S
from midflight.errors import MidflightError, WeightsReplacedError
from midflight.generation.driver import GeneratorDriver
from midflight.protocols import WeightReceiver

_log = logging.getLogger(__name__)


class WeightPull:
    """Stages the newest weights of a receiver. A newer wish is pulled after the one that is under way.

    If a pull fails, the old weights stay in use, and the next `want` tries again.
    """

    def __init__(self, driver: GeneratorDriver, receiver: WeightReceiver) -> None:
        self._driver, self._receiver = driver, receiver
        self._lock = threading.Lock()
        self._wish = ("", 0)  # lineage, version
        self._is_pulling = self._is_closed = False

    def want(self, lineage: str, version: int) -> None:
        """Stage this version or a newer one. Returns at once."""
        with self._lock:
            self._wish = lineage, version
            if self._is_pulling:
                return
            self._is_pulling = True
        run_in_background(self._pull)

    def close(self) -> None:
        """Take no more weights."""
        self._is_closed = True
        self._receiver.close()

    def _pull(self) -> None:
        while wish := self._next_wish():
            try:
                self._stage(*wish)
            except WeightsReplacedError:
                continue
            except MidflightError as error:
                _log.warning("version %d cannot be pulled: %s", wish[1], error)
                with self._lock:
                    self._is_pulling = False
                return

    def _next_wish(self) -> tuple[str, int] | None:
        with self._lock:
            here = (self._driver.active, self._driver.staged)
            if self._is_closed or any(weights and weights.covers(*self._wish) for weights in here):
                self._is_pulling = False
                return None
            return self._wish

    def _stage(self, lineage: str, version: int) -> None:
        if self._receiver.wait(newer_than=version - 1, timeout_s=WAIT_SLICE_S):
            self._driver.stage(replace(self._receiver.receive(), lineage=lineage))
