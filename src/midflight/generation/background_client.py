"""An HTTP client in a thread of its own: requests that take long do not block the caller, and end when it is closed.

consumes       coroutines
waits for      the server, in its own event loop
unblocked by   answers; close
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import httpx

T = TypeVar("T")


class BackgroundClient:
    """An event loop in a thread with an `httpx.AsyncClient`, `http`.

    `options`: of the httpx client. By default, an answer may take any time: a stream is silent while its sequence waits
    for a slot, or the server is paused.
    """

    def __init__(self, options: Mapping[str, Any], timeout_s: float) -> None:
        self.http = httpx.AsyncClient(**{**options, "timeout": httpx.Timeout(timeout_s, read=None)})
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-generator", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine that `close` cancels. Call from a coroutine of this client."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hang_up(self) -> bool:
        """Cancel what was started and disconnect. Return False if this was done before."""
        if self._loop.is_closed():
            return False
        self.run(self._hang_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return True

    async def _hang_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.http.aclose()
