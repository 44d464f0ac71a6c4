"""Client of the control routes of generation servers, for the trainer: health, invitations, announcements, progress.

consumes       requests from any thread; each returns a future at once
waits for      the servers' answers, in a thread with its own event loop
unblocked by   the answer, a lost connection, cancellation of the future, close
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import httpx
import msgspec

from midflight.concurrency.event_loop import EventLoopThread
from midflight.errors import WeightUpdateError
from midflight.weights.process_group import Announcement, Invitation
from midflight.weights.progress import Progress

# Environment variables of the server and its clients: the admin token, and a key for the OpenAI routes.
TOKEN_VARIABLE, KEY_VARIABLE = "MIDFLIGHT_ADMIN_TOKEN", "MIDFLIGHT_API_KEY"
PROTOCOL = 2  # version of the weight routes
# Longest wait for a short answer. A busy server may take seconds.
ANSWER_S = 10.0

Answer = TypeVar("Answer")


class EngineError(WeightUpdateError):
    """A request to a server failed. `kind`: the server is gone, its model does not fit, or a transfer failed."""

    def __init__(self, text: str, kind: Literal["gone", "unfit", "failed"]) -> None:
        super().__init__(text)
        self.kind = kind


@functools.cache
def trusted_authorities() -> ssl.SSLContext:
    """Return the TLS settings of clients: the authorities of the system, or of the file $SSL_CERT_FILE."""
    return ssl.create_default_context()


def engine_error(error: BaseException) -> EngineError:
    """The error itself, or an EngineError in its place."""
    return error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}", "failed")


@dataclass(frozen=True, slots=True)
class Health:
    """State of a server: the weights that it samples with, and weights that it holds besides, ready to be adopted."""

    weight_version: int
    protocol: int = 0
    lineage: str = ""
    content: int | None = None
    staged_version: int | None = None
    staged_lineage: str | None = None
    staged_content: int | None = None
    backends: tuple[str, ...] = ("tcp",)

    def newest(self, lineage: str) -> tuple[int | None, int | None]:
        """Newest version of this lineage on the server, and its content; None if it has no such weights."""
        if self.staged_version is not None and self.staged_lineage == lineage:
            return self.staged_version, self.staged_content
        return (self.weight_version, self.content) if self.lineage == lineage else (None, None)


class EngineControl:
    """Connections to the servers. Futures raise EngineError.

    `timeout_s`: for the answer to an invitation. An announcement is answered when the weights have been received, which
    takes as long as it takes.
    """

    def __init__(self, token: str | None, timeout_s: float) -> None:
        self._timeout_s, self._answer_s = timeout_s, min(timeout_s, ANSWER_S)
        # Proxy settings of the environment do not apply to the machines of a run. Idle connections are not kept: the
        # server may close one just when it is used.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.AsyncClient(headers=headers, limits=limits, trust_env=False, verify=trusted_authorities())
        self._loop = EventLoopThread("engine control")

    def health(self, url: str) -> Future[Health]:
        return self._submit(self._ask("GET", f"{url}/health", Health, self._answer_s))

    def progress(self, url: str) -> Future[Progress]:
        return self._submit(self._ask("GET", f"{url}/weights", Progress, self._answer_s))

    def invite(self, url: str, invitation: Invitation) -> Future[Any]:
        """Ask a server to join; the answer comes when it has joined."""
        # The server needs the time twice: to wait for the other members, and to connect to them.
        timeout_s = 2 * self._timeout_s + self._answer_s
        body = {**asdict(invitation), "protocol": PROTOCOL}
        return self._submit(self._ask("POST", f"{url}/init_process_group", Any, timeout_s, body))

    def announce(self, url: str, announcement: Announcement, lineage: str, content: int) -> Future[Any]:
        """Ask a server to receive weights; the answer comes when they are complete there.

        Without tensors: ask it to give its weights of this `content` a new version.
        """
        body = {
            "version": announcement.version,
            "names": [spec.name for spec in announcement.specs],
            "dtypes": [spec.dtype for spec in announcement.specs],
            "shapes": [spec.shape for spec in announcement.specs],
            "bucket_bytes": announcement.bucket_bytes,
            "lineage": lineage,
            "content": content,
            "adopt": False,
        }
        timeout_s = None if announcement.specs else self._answer_s
        return self._submit(self._ask("POST", f"{url}/request_weight_update", Any, timeout_s, body))

    def close(self) -> None:
        """Close all connections; requests under way are canceled."""
        self._loop.close(self._client.aclose)

    def _submit(self, coroutine: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        if self._loop.is_closed:
            coroutine.close()
            raise EngineError("the connections to the servers are closed", "failed")
        return self._loop.submit(coroutine)

    async def _ask(
        self, method: str, url: str, kind: type[Answer], timeout_s: float | None, body: Mapping[str, Any] | None = None
    ) -> Answer:
        timeout = httpx.Timeout(timeout_s, connect=self._answer_s)
        try:
            response = await self._client.request(method, url, json=body, timeout=timeout)
        except httpx.TimeoutException as error:
            raise EngineError(f"{url} gave no answer", "gone") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(f"{url} cannot be reached: {error or type(error).__name__}", "gone") from error
        if response.is_error:
            raise _refusal(url, response)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{url} gave an answer of another protocol: {error}", "unfit") from error


def _refusal(url: str, response: httpx.Response) -> EngineError:
    """Return the error that a server has answered with."""
    try:
        detail = response.json()["error"]
        message, code = str(detail["message"]), detail.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return EngineError(f"{url} answered with status {response.status_code}", _kind_of_status(response.status_code))
    if code == "weights_do_not_fit":
        return EngineError(message, "unfit")
    return EngineError(message, _kind_of_status(response.status_code))


def _kind_of_status(status: int) -> Literal["gone", "unfit", "failed"]:
    """The token is wrong or the route is missing: no repetition helps."""
    return "unfit" if status in (401, 403, 404, 405, 422) else "failed"
