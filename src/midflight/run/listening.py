"""The listening socket of a server, its certificate, and the loop that accepts connections.

consumes       connections, from the backlog of the system
waits for      a connection; its TLS handshake, in a task of its own; its turn, while a run is connected
unblocked by   a connection; the timeout of the handshake; time
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from midflight.config.serving import ServeConfig
from midflight.errors import RecipeError
from midflight.generation.admission import Pacer

_BACKLOG = 512  # connections that wait for their turn; beyond, the system makes clients try again
# Time to accept a connection, without and with TLS (seconds), and the largest share of the time for that beside a run.
_ACCEPT_S, _HANDSHAKE_S, _SHARE, _BURST_S = 4e-4, 3e-3, 0.05, 0.5
_MAX_HANDSHAKES = 128
_RETRY_S = 1.0  # after the system has refused a connection, for example because too many files are open

_log = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Open the server socket. Called before the model is loaded, so that a port in use is reported at once.

    Raises: RecipeError if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise RecipeError(f"cannot listen on {host}:{port}: {reason}; serve.port = 0 picks a free port") from error
    # Connections inherit TCP_NODELAY. asyncio sets it only on sockets created with an explicit protocol. Without it, an
    # answer on a kept connection waits 40 ms for the client's delayed acknowledgment.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, has_tls: bool) -> str:
    """Return the URL of the server."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(serve: ServeConfig) -> ssl.SSLContext | None:
    """Return the TLS settings of the server, or None without a certificate.

    Raises: RecipeError if the certificate and the key cannot be read, or do not belong together.
    """
    certificate, key = serve.tls_cert_file, serve.tls_key_file
    if certificate is None:
        if key is not None:
            raise RecipeError(f"serve.tls_key_file = {key} needs serve.tls_cert_file, the certificate of this key")
        return None
    _check_readable("serve.tls_cert_file", certificate)
    if key is not None:
        _check_readable("serve.tls_key_file", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # not asked for on the terminal
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise RecipeError(
            f"serve.tls_cert_file = {certificate} and the key in {key or certificate} cannot be used: {reason}; they"
            " must be a PEM certificate and its private key without a password"
        ) from error
    return context


def _check_readable(key: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{key}: cannot read {path}: {error.strerror}") from error


class Acceptor:
    """Accepts connections. Beside a run, they take turns, so that a flood of them costs the run little."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
        is_beside_run: Callable[[], bool],
    ) -> None:
        self._listener, self._protocol, self._tls = listener, protocol, tls
        self._handshake_timeout_s, self._is_beside_run = handshake_timeout_s, is_beside_run
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._pacer = Pacer(_SHARE, _BURST_S)

    async def run(self) -> None:
        """Accept connections until canceled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    _log.warning("cannot accept a connection: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                if len(self._handshakes) >= _MAX_HANDSHAKES:
                    next(iter(self._handshakes)).cancel()
                task = loop.create_task(self._start(connection))
                self._handshakes[task] = None
                task.add_done_callback(lambda done: self._handshakes.pop(done, None))
                cost_s = _ACCEPT_S if self._tls is None else _HANDSHAKE_S
                # A delay of 0 lets other tasks run: a backlog full of connections must not keep the loop.
                delay_s = self._pacer.delay_s(cost_s, time.monotonic()) if self._is_beside_run() else 0.0
                await asyncio.sleep(delay_s)
        finally:
            for task in list(self._handshakes):
                task.cancel()

    async def _start(self, connection: socket.socket) -> None:
        timeout_s = None if self._tls is None else self._handshake_timeout_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, asyncio.CancelledError):  # of the client, or of its handshake
            with contextlib.suppress(OSError):
                connection.close()
