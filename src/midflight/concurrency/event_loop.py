"""An event loop in a thread of its own, which several owners may share.

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
        return _canceled(coroutine)

    def close(self, last: Callable[[], Awaitable[object]] | None = None) -> bool:
        """Cancel all coroutines, run `last`, and end the thread. Return False if this was done before."""
        if self.is_closed:
            return False
        self.submit(_cancel_all(last)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return True


class Coroutines:
    """Coroutines of one owner in an event loop."""

    def __init__(self, loop: EventLoopThread) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine, from any thread. `close` cancels the future."""
        return _canceled(coroutine) if self._is_closed else self._loop.submit(self._run(coroutine))

    def close(self, last: Callable[[], Awaitable[object]]) -> bool:
        """Cancel the owner's coroutines and run `last`. Return False if this was done before."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_closed = True
        self._loop.submit(_cancel(self._tasks, last)).result()
        return True

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            coroutine.close()
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        finally:
            self._tasks.discard(task)


def _canceled(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    coroutine.close()
    canceled: Future[T] = Future()
    canceled.cancel()
    canceled.set_running_or_notify_cancel()
    return canceled


async def _cancel_all(last: Callable[[], Awaitable[object]] | None) -> None:
    current = asyncio.current_task()
    assert current is not None
    await _cancel(asyncio.all_tasks() - {current}, last)


async def _cancel(tasks: set[asyncio.Task[Any]], last: Callable[[], Awaitable[object]] | None) -> None:
    canceled = list(tasks)
    for task in canceled:
        task.cancel()
    await asyncio.gather(*canceled, return_exceptions=True)
    if last is not None:
        await last()
