"""An HTTP client in a thread of its own: requests that take long do not block the caller, and end when it is closed.

consumes       coroutines
waits for      the server, in its own event loop
unblocked by   answers; close
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import httpx

from midflight.concurrency.event_loop import EventLoopThread

T = TypeVar("T")


class BackgroundClient:
    """An event loop in a thread with an `httpx.AsyncClient`, `http`.

    `options`: of the httpx client. By default, an answer may take any time: a stream is silent while its sequence waits
    for a slot, or the server is paused.
    """

    def __init__(self, options: Mapping[str, Any], timeout_s: float) -> None:
        self.http = httpx.AsyncClient(**{**options, "timeout": httpx.Timeout(timeout_s, read=None)})
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = EventLoopThread("http-generator")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result. Raises: CancelledError after `hang_up`."""
        return self._loop.submit(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine that `hang_up` cancels. Call from a coroutine of this client."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hang_up(self) -> bool:
        """Cancel all coroutines and disconnect. Return False if this was done before."""
        return self._loop.close(self.http.aclose)
