"""HTTPGenerator: a Generator over an HTTP server.

consumes       server-sent events, in a thread with its own event loop
waits for      add, abort: the server's answer; step: a completion, at most STEP_S
unblocked by   the answer or completion; a lost connection

Tokens are streamed, so that a lost server does not lose the tokens it has sent: `abort` returns them, and the request
can be resumed on another server.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

import httpx

from midflight.errors import GenerationLostError
from midflight.generation.schemas import Model, ModelList, lists_of
from midflight.generation.token_streams import TokenStreams, reason_of, refusal_of
from midflight.types import Completion, GeneratedTokens, GenerationRequest, RolloutId
from midflight.weights.buckets import DEFAULT_BUCKET_BYTES
from midflight.weights.process_group import (
    DEFAULT_TIMEOUT_S,
    Announcement,
    Backend,
    Invitation,
    ProcessGroupSender,
    local_address,
)

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_VARIABLE = "MIDFLIGHT_ADMIN_TOKEN"  # environment variable of the server and its clients
STEP_S = 0.05
# Shorter than the keep-alive of any server, so that no connection is used while the server is closing it.
KEEPALIVE_S = 2.0


class HTTPGenerator:
    """Implements Generator over a server. Close it, or use it in a `with` block.

    `chunk_tokens`: tokens per chunk of the stream; `generated` may lag behind the server by this many tokens.
    `timeout_s`: for an answer, for joining the process group, and for each bucket of weights. `ended`: an event, set
    when `step` has something to return or raise; with it, `step` never waits, so that a pool can wait for several
    generators at once.

    After `update_weights`, the server refuses requests if its weights are older, because it has restarted since.
    Raises: GenerationLostError from any method if the server cannot be reached.
    """

    def __init__(
        self,
        base_url: str,
        *,
        admin_token: str | None = None,
        chunk_tokens: int = 16,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        backend: Backend = "gloo",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        ended: threading.Event | None = None,
    ) -> None:
        self._chunk_tokens, self._timeout_s, self._ended = chunk_tokens, timeout_s, ended
        self._sent_version: int | None = None
        self._backend, self._bucket_bytes = backend, bucket_bytes
        self._sender: ProcessGroupSender | None = None
        headers = {"Authorization": f"Bearer {admin_token}"} if admin_token else {}
        limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
        # Proxy settings of the environment do not apply to the machines of a run.
        options: dict[str, Any] = {
            "base_url": base_url, "headers": headers, "timeout": timeout_s, "limits": limits, "trust_env": False
        }  # fmt: skip
        try:
            self._control = httpx.Client(**options)
        except httpx.InvalidURL as error:
            raise GenerationLostError(f"{base_url} is not a URL: {error}") from error
        try:
            self._call("GET", "/health")
        except BaseException:
            self._control.close()
            raise
        self._streams = TokenStreams(options, timeout_s, ended)

    @property
    def weight_version(self) -> int:
        """Weight version of the server. Makes a request, because another client may have updated the server."""
        version: int = self._call("GET", "/health")["weight_version"]
        return version

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    @property
    def num_engines(self) -> int:
        return 1

    @property
    def update_pending(self) -> bool:
        return False

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests; return when the server has accepted all of them.

        Raises: RequestError if the server refuses one; then none is added.
        """
        self._streams.open(requests, self._body)

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        return self._streams.generated(rollout_id, start)

    def step(self) -> list[Completion]:
        """Return the completions since the last call; wait up to STEP_S for the first one.

        Raises: GenerationError, GenerationLostError at every call while a lost request is not aborted.
        """
        return self._streams.take_ended(STEP_S if self._ended is None else 0.0)

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """Abort requests and return their tokens; if the server is lost, the tokens that had arrived.

        Other threads may call `step`, `abort` or `close` at the same time.
        """
        open_ids = self._streams.still_open(rollout_ids)
        if open_ids:
            try:
                self._call("POST", "/abort", {"rollout_ids": open_ids})
            except GenerationLostError as error:
                self._streams.lose(open_ids, error)
        return self._streams.take_aborted(rollout_ids)

    def update_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Send weights over a process group, which the first call creates; return when the server samples with them."""
        if self._sender is None:
            url = self._control.base_url
            address = local_address(url.host, url.port or 80)
            self._sender = ProcessGroupSender(
                address, timeout_s=self._timeout_s, backend=self._backend, bucket_bytes=self._bucket_bytes
            )
        if not self._sender.is_connected:
            self._sender.connect(self._invite)
        self._sender.send(version, weights, self._announce)
        self._sent_version = version

    def limits(self) -> Model:
        """Ask the server for its model and limits."""
        answer = self._call("GET", "/v1/models")
        try:
            return model_of(answer)
        except ValueError as error:
            raise GenerationLostError(f"{self._control.base_url} does not answer like a `midflight serve`") from error

    def close(self) -> None:
        """Disconnect. The server aborts the requests in flight; `abort` still returns the tokens that had arrived."""
        if self._sender is not None:
            self._sender.close()
        if self._streams.close(GenerationLostError(f"{self._control.base_url}: closed")):
            self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _invite(self, invitation: Invitation) -> None:
        self._call("POST", "/init_process_group", asdict(invitation), patient=True)

    def _announce(self, rank: int, announcement: Announcement) -> None:
        body = {
            "version": announcement.version,
            "names": [spec.name for spec in announcement.specs],
            "dtypes": [spec.dtype for spec in announcement.specs],
            "shapes": [spec.shape for spec in announcement.specs],
            "bucket_bytes": announcement.bucket_bytes,
        }
        self._call("POST", "/request_weight_update", body, patient=True)

    def _call(self, method: str, path: str, body: object = None, *, patient: bool = False) -> Any:
        """Make a control request and return the answer.

        `patient`: wait for the answer without a timeout, because the process group has its own.
        """
        timeout = httpx.Timeout(self._timeout_s, read=None if patient else self._timeout_s)
        try:
            response = self._control.request(method, path, json=body, timeout=timeout)
            if not response.is_success:
                raise refusal_of(response)
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise GenerationLostError(f"{self._control.base_url.join(path)}: {reason_of(error)}") from error

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling, generated = request.sampling, request.generated
        body: dict[str, Any] = {
            **asdict(sampling),
            "prompt": request.prompt_token_ids.tolist(),
            "seed": request.seed,
            "rollout_id": request.rollout_id,
            "first_position": request.first_position,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"chunk_tokens": self._chunk_tokens},
        }
        if request.score_prompt:
            body["echo"] = True  # the server refuses `echo` in a stream, with a clear message
        if self._sent_version is not None:
            body["min_weight_version"] = self._sent_version
        if generated:
            body["generated"] = lists_of(generated)
        return body


def model_of(answer: object) -> Model:
    """Return the model in an answer to /v1/models.

    Raises: ValueError if the answer does not come from a `midflight serve`.
    """
    (model,) = ModelList.model_validate(answer).data
    return model
