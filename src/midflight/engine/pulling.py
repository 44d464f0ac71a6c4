"""An engine that takes its weights itself, from shared memory or files.

A background thread stages the newest weights while `step` goes on with the old ones.

    consumes       weights of a WeightReceiver, newest first
    waits for      the background thread, in the last step of an update, or in the first step after an idle time
    unblocked by   the end of `LocalEngine.stage`
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext

from midflight.engine.delegating import DelegatingGenerator
from midflight.errors import WeightsReplacedError
from midflight.protocols import LocalEngine, WeightReceiver
from midflight.types import Completion


class PullingGenerator(DelegatingGenerator):
    """Implements Generator: `adopt` pulls the newest weights from a receiver into an engine.

    An update is over within `max_steps` steps: the last of them waits for the tensors before it samples. If nothing was
    in flight at `adopt`, the next step waits, so that later requests are sampled by the new weights only. A version
    asked for during an update is pulled after the update. A failed update ends with an error in `step`, and the version
    may be asked for again.

    A model that is copied in less time than a decode step takes is copied between two steps: both threads would slow
    each other down by more, because they share the interpreter's lock.
    """

    def __init__(
        self,
        engine: LocalEngine,
        receiver: WeightReceiver,
        max_steps: int = 8,
        pausing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`pausing`: returns a context that is entered while `step` waits for the tensors of an update."""
        super().__init__(engine)
        self._engine, self._receiver, self._max_steps, self._pausing = engine, receiver, max_steps, pausing
        # One thread for all updates: every new thread would start its own threads for products.
        self._thread = ThreadPoolExecutor(1, "stage-weights")
        self._pull: Future[int] | None = None
        self._wanted = self._asked = engine.weight_version  # newest wish; the wish at the start of the pull
        self._must_wait = False  # the wanted version must come before the next token
        self._steps_left = 0
        self._pull_s = math.inf  # time that the last pull spent on a core
        self._step_s = 0.0  # duration of the last step without a pull

    def adopt(self, version: int) -> None:
        if version <= max(self._wanted, self.weight_version):
            return
        self._wanted = version
        self._must_wait |= not self.num_in_flight
        if self._pull is None:
            self._begin()

    def step(self) -> list[Completion]:
        self._steps_left -= 1
        if self._pull and self._pull_s < self._step_s:
            with self._pausing():
                wait([self._pull], timeout=self._step_s)
        while self._pull and (self._must_wait or self._steps_left <= 0 or self._pull.done()):
            version = self._end()
            if self._must_wait and version < self._wanted:
                self._begin()
                continue
            self._must_wait = False
            self._engine.adopt(version)
        is_alone, started = self._pull is None, time.perf_counter()
        completions = self._engine.step()
        if is_alone and self.num_in_flight:
            self._step_s = time.perf_counter() - started
        if self._pull is None and self._wanted > self.weight_version:
            self._begin()
        return completions

    def close(self) -> None:
        """Wait for the update that is going on, if there is one, and close the receiver."""
        self._thread.shutdown()
        self._receiver.close()

    def _begin(self) -> None:
        self._steps_left, self._asked = self._max_steps, self._wanted
        self._pull = self._thread.submit(self._stage_newest)

    def _end(self) -> int:
        """Wait for the staged version and return it. Raises: the error that kept it from being complete."""
        assert self._pull
        pull, self._pull = self._pull, None
        try:
            with nullcontext() if pull.done() else self._pausing():
                version = pull.result()
        except Exception:
            self._wanted, self._must_wait = self.weight_version, False
            raise
        if version < self._asked == self._wanted:  # the sender has gone back, and the wish cannot be met
            self._wanted = version
        return version

    def _stage_newest(self) -> int:
        while True:
            started = time.thread_time()
            incoming = self._receiver.receive()
            try:
                self._engine.stage(incoming)
            except WeightsReplacedError:
                continue
            self._pull_s = time.thread_time() - started
            return incoming.version
