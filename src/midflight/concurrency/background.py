"""Blocking calls in threads that never keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_background(function: Callable[[], T]) -> Future[T]:
    """Run `function` in a new daemon thread; the future holds its result or exception."""
    future: Future[T] = Future()
    name = getattr(function, "__qualname__", "background")
    threading.Thread(target=_resolve, args=(future, function), name=name, daemon=True).start()
    return future


def run_at_once(function: Callable[[], T]) -> Future[T]:
    """Run `function` in this thread; the future is done when it is returned."""
    future: Future[T] = Future()
    _resolve(future, function)
    return future


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
