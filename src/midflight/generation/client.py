"""HTTPGenerator: a Generator over an HTTP server.

consumes       the messages of a rollout stream, and the answers to POST /adopt, in the thread of an event loop
waits for      add, abort: the server's answer; step: a completion, at most STEP_S; adopt: nothing
unblocked by   the answer or completion; a lost connection

Tokens are streamed, so that a lost server does not lose the tokens it has sent: `abort` returns them, and the request
can be resumed on another server. New weights reach the server on their own; `adopt` only says which ones to use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Self

import httpx

from midflight.concurrency.event_loop import Coroutines, EventLoopThread
from midflight.errors import GenerationLostError, MidflightError, ModelError, RequestError
from midflight.generation.adoption import Adoption
from midflight.generation.answers import reason_of, refusal_of
from midflight.generation.rollout_stream import RolloutStream
from midflight.generation.schemas import Model, ModelList, Status
from midflight.types import Completion, GeneratedTokens, GenerationRequest, RolloutId
from midflight.weights.engine_control import PROTOCOL, trusted_authorities

DEFAULT_TIMEOUT_S = 60.0
STEP_S = 0.05
# Shorter than the keep-alive of any server, so that no connection is used while the server is closing it.
KEEPALIVE_S = 2.0


class HTTPGenerator:
    """Implements Generator over a server. Close it, or use it in a `with` block.

    `chunk_tokens`: tokens per chunk of the stream; `generated` may lag behind the server by this many tokens.
    `timeout_s`: for an answer. `notify`: called from another thread when `step` has something to return or raise, or
    `weight_version` has changed; with it, `step` never waits, so that a pool can wait for several generators at once.
    `lineage`: of the weights that may be sampled with; None: the lineage of the server's weights. `loop`: event loop,
    shared with other generators; None: one of its own.

    `weight_version` is -1 while the weights are of another lineage. If the server has restarted since and its weights
    are older, it refuses requests.
    Raises: GenerationLostError from any method except `adopt` if the server cannot be reached; ModelError from the
    constructor if the server follows another version of the protocol.
    """

    def __init__(
        self,
        base_url: str,
        *,
        admin_token: str | None = None,
        chunk_tokens: int = 16,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        notify: Callable[[], object] | None = None,
        lineage: str | None = None,
        loop: EventLoopThread | None = None,
    ) -> None:
        self._chunk_tokens, self._lineage = chunk_tokens, lineage
        self._waits = notify is None
        notify = notify or _ignore
        headers = {"Authorization": f"Bearer {admin_token}"} if admin_token else {}
        try:
            # Proxy settings of the environment do not apply to the machines of a run.
            self._http = httpx.AsyncClient(
                base_url=base_url,
                headers=headers,
                timeout=timeout_s,
                limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
                trust_env=False,
                verify=trusted_authorities(),
            )
        except httpx.InvalidURL as error:
            raise GenerationLostError(f"{base_url} is not a URL: {error}") from error
        self._loop, self._owns_loop = loop or EventLoopThread("http-generator"), loop is None
        self._coroutines = Coroutines(self._loop)
        self._adoption = Adoption(self._http, self._coroutines, lineage, timeout_s, notify)
        self._stream = RolloutStream(base_url, headers, timeout_s, self._coroutines, notify, self._adoption.learn)
        try:
            health = self._health()
            self.num_slots = health.num_slots  # sequences that the server generates at a time; None: not known
            if lineage in (None, health.lineage):
                self._adoption.weight_version = health.weight_version
            self._stream.connect()
        except BaseException:
            self.close()
            raise

    @property
    def weight_version(self) -> int:
        """Weight version of the server, as far as its answers and tokens tell."""
        return self._adoption.weight_version

    @property
    def num_in_flight(self) -> int:
        return len(self._stream)

    @property
    def num_engines(self) -> int:
        return 1

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests. With `notify`, this does not wait for the server; if it refuses one, `step` raises the refusal.

        Raises: RequestError if the server refuses one; then none is added.
        """
        if any(request.score_prompt for request in requests):
            raise RequestError("a server scores prompts through /v1/completions with echo, not as rollouts")
        accepted = self._stream.open(requests, self._chunk_tokens, self._lineage, max(0, self.weight_version))
        if self._waits:
            try:
                accepted.result()
            except CancelledError as error:
                raise GenerationLostError(f"{self._http.base_url}: closed") from error
            except MidflightError:
                self._stream.forget(requests)
                raise
        else:
            ids = [request.rollout_id for request in requests]
            accepted.add_done_callback(functools.partial(self._note_refusal, ids))

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        return self._stream.generated(rollout_id, start)

    def step(self) -> list[Completion]:
        """Return the completions since the last call; wait up to STEP_S for the first one.

        Raises: GenerationError, GenerationLostError at every call while a lost request is not aborted; GenerationError
        once if the server has refused `adopt`.
        """
        completions = self._stream.take_ended(STEP_S if self._waits else 0.0)
        if not completions and (failure := self._adoption.take_failure()):
            raise failure
        return completions

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """Abort requests and return their tokens; if the server is lost, the tokens that had arrived.

        Other threads may call `step`, `abort` or `close` at the same time.
        """
        return self._stream.abort(rollout_ids)

    def adopt(self, version: int) -> None:
        """Ask the server to sample with this version or a newer one; asks again after a lost connection."""
        self._adoption.ask(version)

    def check_health(self) -> None:
        """Check that the server answers. Raises: GenerationLostError, GenerationError."""
        self._health()

    def limits(self) -> Model:
        """Ask the server for its model and limits."""
        answer = self._get("/v1/models")
        try:
            return model_of(answer)
        except ValueError as error:
            raise GenerationLostError(f"{self._http.base_url} does not answer like a `midflight serve`") from error

    def close(self) -> None:
        """Disconnect. The server aborts the requests in flight; `abort` still returns the tokens that had arrived."""
        if not self._coroutines.close(self._disconnect):
            return
        self._stream.fail(GenerationLostError(f"{self._http.base_url}: closed"))
        if self._owns_loop:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _health(self) -> Status:
        answer = self._get("/health")
        protocol = answer.get("protocol") if isinstance(answer, dict) else None
        if protocol != PROTOCOL:
            raise ModelError(
                f"{self._http.base_url} follows version {protocol} of the protocol, and this client version"
                f" {PROTOCOL}; install the same midflight for both"
            )
        return Status.model_validate(answer)

    def _get(self, path: str) -> Any:
        try:
            response = self._coroutines.submit(self._http.get(path)).result()
            if not response.is_success:
                raise refusal_of(response)
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise GenerationLostError(f"{self._http.base_url.join(path)}: {reason_of(error)}") from error
        except CancelledError as error:
            raise GenerationLostError(f"{self._http.base_url}: closed") from error

    def _note_refusal(self, rollout_ids: Sequence[RolloutId], accepted: Future[None]) -> None:
        error = None if accepted.cancelled() else accepted.exception()
        if isinstance(error, MidflightError):
            self._stream.lose(rollout_ids, error)

    async def _disconnect(self) -> None:
        self._stream.disconnect()
        await self._http.aclose()


def _ignore() -> None:
    """Nobody waits for this generator."""


def model_of(answer: object) -> Model:
    """Return the model in an answer to /v1/models.

    Raises: ValueError if the answer does not come from a `midflight serve`.
    """
    (model,) = ModelList.model_validate(answer).data
    return model
