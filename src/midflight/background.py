"""Calls that block, in threads that never keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_background(function: Callable[[], T]) -> Future[T]:
    """Start the call in a daemon thread of its own; what it returns or raises is the future's."""
    future: Future[T] = Future()

    def body() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=body, name=getattr(function, "__qualname__", "background"), daemon=True).start()
    return future
