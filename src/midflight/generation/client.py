"""A Generator that is somewhere else: behind the HTTP contract.

consumes       server-sent events, in a thread with an event loop of its own
waits for      add, abort: the server's answer; step: a completion, but not longer than STEP_S
unblocked by   that; a lost connection

Tokens are streamed, so that what a lost server had generated is not lost: `abort` gives it back, ready to be resumed
elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx
import numpy as np

from midflight.errors import GenerationError, GenerationLostError, MidflightError, RequestError, WeightUpdateError
from midflight.generation.schemas import ModelList
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, RolloutId
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

TOKEN_VARIABLE = "MIDFLIGHT_ADMIN_TOKEN"  # of the environment; both ends look there
STEP_S = 0.05
# Shorter than any server's patience with an idle connection, so that none is used just as it is closed.
KEEPALIVE_S = 2.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server can take."""

    vocab_size: int
    max_length: int  # of a sequence, tokens
    max_choices: int  # sequences in one request

    @classmethod
    def of(cls, answer: object) -> ServerLimits:
        """From the answer to /v1/models. Raises: ValueError if it is not ours."""
        (model,) = ModelList.model_validate(answer).data
        return cls(model.vocab_size, model.max_length, model.max_choices)


@dataclass(slots=True)
class _Running:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    num_repeated: int = 0  # tokens the request came with, which the server is going to say again
    finish_reason: FinishReason | None = None
    failure: MidflightError | None = None

    @classmethod
    def of(cls, request: GenerationRequest) -> _Running:
        known = request.generated
        if known is None:
            return cls()
        return cls(known.token_ids.tolist(), known.logprobs.tolist(), known.weight_versions.tolist(), len(known))

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def generated(self, start: int = 0) -> GeneratedTokens:
        return GeneratedTokens(
            np.array(self.token_ids[start:], np.int32),
            np.array(self.logprobs[start:], np.float32),
            np.array(self.weight_versions[start:], np.int32),
        )


class HTTPGenerator:
    """Implements Generator over a server. Close it, or use it in a `with` block.

    `chunk_tokens`: tokens of a sequence that travel together; `generated` is behind by as many. `timeout_s`: for an
    answer, for joining the process group, and for each bucket of weights. `ended`: set when there is something for
    `step` to return or raise; `step` then leaves the waiting to whoever looks at several of these.

    Once it has sent weights, the server refuses requests if its own are older: it was started again meanwhile.
    Raises: GenerationLostError if the server cannot be reached, from any method.
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
        self._running: dict[RolloutId, _Running] = {}
        self._changed = threading.Condition()
        headers = {"Authorization": f"Bearer {admin_token}"} if admin_token else {}
        limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
        # A proxy of the environment is not meant for the machines of a run.
        options: dict[str, Any] = {
            "base_url": base_url, "headers": headers, "timeout": timeout_s, "limits": limits, "trust_env": False
        }  # fmt: skip
        try:
            self._control = httpx.Client(**options)
        except httpx.InvalidURL as error:
            raise GenerationLostError(f"{base_url} is no URL: {error}") from error
        try:
            self._call("GET", "/health")
        except BaseException:
            self._control.close()
            raise
        # A stream is silent while its sequence waits for a row, or the server is paused.
        self._streams = httpx.AsyncClient(**{**options, "timeout": httpx.Timeout(timeout_s, read=None)})
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-generator", daemon=True)
        self._thread.start()

    @property
    def weight_version(self) -> int:
        """Asks the server: others may update it."""
        version: int = self._call("GET", "/health")["weight_version"]
        return version

    @property
    def num_in_flight(self) -> int:
        return len(self._running)

    @property
    def num_engines(self) -> int:
        return 1

    @property
    def update_pending(self) -> bool:
        return False

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Returns when the server has accepted them all.

        Raises: RequestError if it refuses one; then none of them is added.
        """
        asyncio.run_coroutine_threadsafe(self._open_all(requests), self._loop).result()

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        with self._changed:
            return self._running[rollout_id].generated(start)

    def step(self) -> list[Completion]:
        """The completions that came since; waits a moment for one.

        Raises: GenerationError, GenerationLostError if a request was lost, until it is aborted.
        """
        with self._changed:
            if self._running and self._ended is None:
                self._changed.wait_for(lambda: any(each.has_ended for each in self._running.values()), STEP_S)
            ended = [rollout_id for rollout_id, running in self._running.items() if running.finish_reason]
            lost = next((running.failure for running in self._running.values() if running.failure), None)
            if lost and not ended:
                raise lost
            return [self._take(rollout_id) for rollout_id in ended]

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """Also of a lost server: then what had arrived."""
        with self._changed:
            wanted = [rollout_id for rollout_id in rollout_ids if rollout_id in self._running]
            open_ids = [rollout_id for rollout_id in wanted if not self._running[rollout_id].has_ended]
        if open_ids:
            try:
                self._call("POST", "/abort", {"rollout_ids": open_ids})
            except GenerationLostError as error:
                self._lose([self._running[rollout_id] for rollout_id in open_ids], error)
        with self._changed:
            if not self._changed.wait_for(
                lambda: all(self._running[rollout_id].has_ended for rollout_id in open_ids), self._timeout_s
            ):
                raise GenerationLostError(f"aborted rollouts did not end within {self._timeout_s:g} s")
            # One that came to its own end meanwhile is a completion of the next step.
            aborted = [
                rollout_id
                for rollout_id in wanted
                if self._running[rollout_id].finish_reason in (None, FinishReason.ABORT)
            ]
            return [self._take(rollout_id) for rollout_id in aborted]

    def update_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Send the weights over a process group, made on first use; returns when the server samples with them."""
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

    def limits(self) -> ServerLimits:
        """What the server can take."""
        answer = self._call("GET", "/v1/models")
        try:
            return ServerLimits.of(answer)
        except ValueError as error:
            raise GenerationLostError(f"{self._control.base_url} does not answer like a `midflight serve`") from error

    def close(self) -> None:
        """Hang up; the server aborts what is in flight, and `abort` gives back what had arrived of it."""
        if self._loop.is_closed():
            return
        if self._sender is not None:
            self._sender.close()
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result()
        self._lose(list(self._running.values()), GenerationLostError(f"{self._control.base_url}: closed"))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, rollout_id: RolloutId) -> Completion:
        running = self._running.pop(rollout_id)
        return Completion(rollout_id, running.generated(), running.finish_reason or FinishReason.ABORT)

    def _lose(self, lost: Sequence[_Running], failure: MidflightError) -> None:
        with self._changed:
            for running in lost:
                if not running.has_ended:
                    running.failure = failure
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        if self._ended is not None:
            self._ended.set()

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
        """The answer to a control request. `patient`: without a timeout; the process group has its own."""
        timeout = httpx.Timeout(self._timeout_s, read=None if patient else self._timeout_s)
        try:
            response = self._control.request(method, path, json=body, timeout=timeout)
            if not response.is_success:
                raise refusal_of(response)
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise GenerationLostError(f"{self._control.base_url.join(path)}: {reason_of(error)}") from error

    async def _open_all(self, requests: Sequence[GenerationRequest]) -> None:
        opened = await asyncio.gather(*map(self._open, requests), return_exceptions=True)
        refused = [each for each in opened if isinstance(each, BaseException)]
        accepted = [each for each in opened if isinstance(each, httpx.Response)]
        if refused:
            await asyncio.gather(*(response.aclose() for response in accepted))
            raise refused[0]
        for request, response in zip(requests, accepted, strict=True):
            running = _Running.of(request)
            with self._changed:
                self._running[request.rollout_id] = running
            task = self._loop.create_task(self._read(running, response))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self, request: GenerationRequest) -> httpx.Response:
        """The response as soon as its headers are there: the server has then accepted the request."""
        http_request = self._streams.build_request("POST", "/v1/completions", json=self._body(request))
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._streams.send(http_request, stream=True)
            if response.is_success:
                return response
            await response.aread()
            raise refusal_of(response)
        except (httpx.HTTPError, ValueError, TimeoutError) as error:
            raise GenerationLostError(f"{http_request.url}: {reason_of(error)}") from error

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling, generated = request.sampling, request.generated
        body: dict[str, Any] = {
            **asdict(sampling),
            "prompt": request.prompt_token_ids.tolist(),
            "seed": request.seed,
            "rollout_id": request.rollout_id,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"chunk_tokens": self._chunk_tokens},
        }
        if request.score_prompt:
            body["echo"] = True  # the server says that a stream cannot have it
        if self._sent_version is not None:
            body["min_weight_version"] = self._sent_version
        if generated:
            body["generated"] = {
                "token_ids": generated.token_ids.tolist(),
                "logprobs": generated.logprobs.tolist(),
                "weight_versions": generated.weight_versions.tolist(),
            }
        return body

    async def _read(self, running: _Running, response: httpx.Response) -> None:
        failure: MidflightError = GenerationLostError(f"{response.url}: the stream broke off")
        try:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take_in(running, json.loads(line.removeprefix("data: ")))
        except GenerationError as error:
            failure = error
        except (httpx.HTTPError, ValueError, KeyError) as error:
            failure = GenerationLostError(f"{response.url}: {reason_of(error)}")
        finally:
            self._lose([running], failure)  # says nothing to one that has ended
            await response.aclose()

    def _take_in(self, running: _Running, event: dict[str, Any]) -> None:
        if "error" in event:
            raise GenerationError(event["error"]["message"])
        for choice in event["choices"]:
            logprobs = choice["logprobs"]["token_logprobs"]
            with self._changed:
                known = min(running.num_repeated, len(choice["token_ids"]))
                running.num_repeated -= known
                running.token_ids += choice["token_ids"][known:]
                running.weight_versions += choice["weight_versions"][known:]
                running.logprobs += [float("nan") if value is None else value for value in logprobs[known:]]
                if choice["finish_reason"]:
                    running.finish_reason = FinishReason(choice["finish_reason"])
                    self._tell()

    async def _hang_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._streams.aclose()


def refusal_of(response: httpx.Response) -> MidflightError:
    """The server's error as our own. Raises: ValueError if it is not in the OpenAI shape."""
    try:
        error = response.json()["error"]
        message, kind, code = error["message"], error["type"], error["code"]
    except (KeyError, TypeError) as unexpected:
        raise ValueError(f"status {response.status_code} with {response.text[:80]!r}") from unexpected
    if kind == "weight_update_error" or code == "update_in_progress":
        return WeightUpdateError(message)
    return RequestError(message) if response.status_code < 500 else GenerationError(message)


def reason_of(error: Exception) -> str:
    """Not every exception has a text."""
    return str(error) or type(error).__name__
