"""Middleware in front of all routes: refuses what can be refused without reading the body, and paces other clients.

consumes       the head of each request
waits for      the turn of a request, if its client is not the run
unblocked by   time

A client of the run has the admin token. Every other client is a stranger, however it is authorized.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from midflight.generation.access import Access, Caller
from midflight.generation.admission import Pacer
from midflight.generation.hosts import HostRules
from midflight.generation.http_errors import (
    ACCESS,
    CALLER,
    ApiError,
    announced_length,
    may_administer,
    unauthorized,
)
from midflight.generation.stream_messages import PATH

# Routes that need no secret: a probe of the server's life, and the documentation, which browsers ask for.
PUBLIC = frozenset({"/health", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})

# Work of the event loop for a request and per byte of its body, for a control request, and for a refusal (seconds).
_REQUEST_S, _BYTE_S, _CONTROL_S, _REFUSAL_S = 4e-3, 5e-8, 1e-3, 4e-4
# Largest share of the event loop's time beside a run: for requests of strangers and for their control requests. The
# latter have a share of their own, because on a server without an admin token they may be the run's.
_REQUEST_SHARE, _CONTROL_SHARE = 0.03, 0.1
_REFUSAL_SHARE = 0.04  # also without a run
_BURST_S = 0.25
# Bodies of strangers up to this are not counted (bytes). The others together have room for so many of the largest size.
_SMALL_BODY, _LARGE_BODIES = 1 << 16, 16

_POLICY_VIOLATION = 1008  # close code of RFC 6455
_CLOSE = {"Connection": "close", "Retry-After": "5"}


class ConnectionTable(Protocol):
    """The open connections of the server."""

    @property
    def is_full(self) -> bool:
        """True if strangers have more connections than they may have."""

    def trust(self, address: tuple[str, int]) -> None:
        """Note that this is a connection of a run."""


class Gate:
    """ASGI middleware. `queue_refusal`: returns why the queue takes nothing from a client, or None.

    `is_beside_run`: returns True while a run is connected.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        hosts: HostRules,
        queue_refusal: Callable[[str], str | None],
        is_beside_run: Callable[[], bool],
        max_body_bytes: int,
        refuse_full: Callable[[str], ApiError],
        connections: ConnectionTable | None = None,
    ) -> None:
        self._app, self._access, self._hosts = app, access, hosts
        self._queue_refusal, self._is_beside_run, self._refuse_full = queue_refusal, is_beside_run, refuse_full
        self._max_body_bytes, self._connections = max_body_bytes, connections
        self._room = _LARGE_BODIES * max_body_bytes
        self._requests, self._controls = Pacer(_REQUEST_SHARE, _BURST_S), Pacer(_CONTROL_SHARE, _BURST_S)
        self._refusals = Pacer(_REFUSAL_SHARE, _BURST_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        peer = scope["client"][0] if scope.get("client") else "local"
        caller = self._access.caller(headers, peer)
        scope[ACCESS], scope[CALLER] = self._access, caller
        refusal = self._hosts.refusal(scope, headers) or self._refusal(scope, caller)
        if refusal is not None:
            await self._refuse(refusal, scope, receive, send)
        elif caller.is_admin or scope["type"] == "websocket":
            if self._connections is not None and (caller.is_admin or scope["path"] == PATH):
                self._connections.trust(scope["client"])
            await self._app(scope, receive, send)
        else:
            await self._serve_stranger(scope, receive, send, announced_length(headers))

    def _refusal(self, scope: Scope, caller: Caller) -> ApiError | None:
        path = scope["path"]
        if self._connections is not None and self._connections.is_full and not caller.is_admin and path != PATH:
            return ApiError(503, "the server has too many connections", code="overloaded", headers=_CLOSE)
        if scope["type"] == "websocket" and path == PATH:
            return None if may_administer(scope) else ApiError(403, "the admin token is wrong")
        if self._access.has_keys and caller.credentials not in ("admin", "key") and path not in PUBLIC:
            return _key_refusal(caller)
        if path.startswith("/v1/") and scope.get("method") == "POST" and not caller.is_admin:
            reason = self._queue_refusal(caller.name)
            return self._refuse_full(reason) if reason else None
        return None

    async def _serve_stranger(self, scope: Scope, receive: Receive, send: Send, length: int | None) -> None:
        reserved = self._max_body_bytes if length is None else min(length, self._max_body_bytes)
        reserved = reserved if reserved > _SMALL_BODY and scope["method"] not in ("GET", "HEAD") else 0
        if reserved > self._room:
            refusal = self._refuse_full("the server is reading as many large bodies as it has memory for")
            await self._refuse(refusal, scope, receive, send)
            return
        self._room -= reserved
        try:
            if self._is_beside_run():
                if scope["path"].startswith("/v1/"):
                    await _pause(self._requests, _REQUEST_S + (length or reserved) * _BYTE_S)
                else:
                    await _pause(self._controls, _CONTROL_S + (length or reserved) * _BYTE_S)
            await self._app(scope, receive, send)
        finally:
            self._room += reserved

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, at a bounded rate: a client that tries again at once must not keep the server busy."""
        if scope.get(CALLER) is None or not scope[CALLER].is_admin:
            await _pause(self._refusals, _REFUSAL_S)
        if scope["type"] == "http":
            await JSONResponse(error.body(), error.status, headers=error.headers)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})  # the client sees a 403


async def _pause(pacer: Pacer, cost_s: float) -> None:
    delay_s = pacer.delay_s(cost_s, time.monotonic())
    if delay_s:
        await asyncio.sleep(delay_s)


def _key_refusal(caller: Caller) -> ApiError:
    code = "invalid_api_key"
    match caller.credentials:
        case "none":
            return unauthorized("this needs the header Authorization: Bearer <API key>", code)
        case "expired":
            return unauthorized("the API key has expired; ask for a new one", code)
        case _:
            return unauthorized("the API key is wrong", code)
