"""An event loop in a thread of its own.

consumes       coroutines, from any thread
waits for      the events of its coroutines
unblocked by   these events; close
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines until it is closed. `name`: of the thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine. The future is canceled when the loop is closed, or at once if it is closed already."""
        if not self.is_closed:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        canceled: Future[T] = Future()
        canceled.cancel()
        canceled.set_running_or_notify_cancel()
        return canceled

    def close(self, last: Callable[[], Awaitable[object]]) -> bool:
        """Cancel all coroutines, run `last`, and end the thread. Return False if this was done before."""
        if self.is_closed:
            return False
        self.submit(_cancel_all(last)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return True


async def _cancel_all(last: Callable[[], Awaitable[object]]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last()
