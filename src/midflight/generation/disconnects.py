"""Answers that end early if their client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499  # the convention for logs; the client is gone


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of the work, or None if the client disconnects first; the work is then canceled."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for future in (task, watch):
            future.cancel()
