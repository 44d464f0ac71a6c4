"""The token streams of one server: one event stream per request, read in the thread of a BackgroundClient.

Tokens arrive in chunks during generation, so that a lost server loses only the tokens of unfinished chunks.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from midflight.errors import (
    GenerationError,
    GenerationLostError,
    MidflightError,
    NonFiniteWeightsError,
    RequestError,
    WeightUpdateError,
)
from midflight.generation.background_client import BackgroundClient
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, RolloutId

_ABORTED = (None, FinishReason.ABORT)


@dataclass(slots=True)
class _Running:
    """One request in flight and the tokens that have arrived."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    num_repeated: int = 0  # tokens that came with the request and that the server has yet to repeat
    finish_reason: FinishReason | None = None
    failure: MidflightError | None = None

    @classmethod
    def from_request(cls, request: GenerationRequest) -> _Running:
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

    def add_choice(self, choice: dict[str, Any]) -> list[int]:
        """Add the next part of the response; return the versions of the tokens that are new."""
        known = min(self.num_repeated, len(choice["token_ids"]))
        self.num_repeated -= known
        self.token_ids += choice["token_ids"][known:]
        self.weight_versions += choice["weight_versions"][known:]
        logprobs = choice["logprobs"]["token_logprobs"][known:]
        self.logprobs += [float("nan") if value is None else value for value in logprobs]
        if choice["finish_reason"]:
            self.finish_reason = FinishReason(choice["finish_reason"])
        versions: list[int] = choice["weight_versions"][known:]
        return versions


class TokenStreams:
    """Requests in flight at one server and the tokens that have arrived. Thread-safe.

    `ended`: event to set when a request has ended. `learn`: receives the weight version of new tokens.
    """

    def __init__(
        self,
        client: BackgroundClient,
        timeout_s: float,
        ended: threading.Event,
        learn: Callable[[int], object] = lambda version: None,
    ) -> None:
        self._client, self._timeout_s, self._ended, self._learn = client, timeout_s, ended, learn
        self._running: dict[RolloutId, _Running] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._running)

    def open(self, requests: Sequence[GenerationRequest], body_of: Callable[[GenerationRequest], object]) -> None:
        """Send these requests; return when the server has accepted all of them.

        Raises: RequestError if the server refuses one; then none is added.
        """
        bodies = [body_of(request) for request in requests]
        self._client.run(self._open_all(requests, bodies))

    def generated(self, rollout_id: RolloutId, start: int) -> GeneratedTokens:
        """Return the tokens of a request that have arrived, from response position `start` on."""
        with self._changed:
            return self._running[rollout_id].generated(start)

    def take_ended(self, timeout_s: float) -> list[Completion]:
        """Remove requests that have ended and return their completions; wait up to `timeout_s` seconds for the first.

        Raises: GenerationError, GenerationLostError at every call while a lost request is not aborted.
        """
        with self._changed:
            if self._running and timeout_s:
                self._changed.wait_for(lambda: any(run.has_ended for run in self._running.values()), timeout_s)
            ended = [rollout_id for rollout_id, running in self._running.items() if running.finish_reason]
            lost = next((running.failure for running in self._running.values() if running.failure), None)
            if lost and not ended:
                raise lost
            return [self._take(rollout_id) for rollout_id in ended]

    def still_open(self, rollout_ids: Sequence[RolloutId]) -> list[RolloutId]:
        """Return the ids of requests that have not ended."""
        with self._changed:
            return [key for key in rollout_ids if key in self._running and not self._running[key].has_ended]

    def take_aborted(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """Wait for the end of these requests; remove and return all except the ones that finished normally.

        Raises: GenerationLostError if a request does not end in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self.still_open(rollout_ids), self._timeout_s):
                raise GenerationLostError(f"aborted rollouts did not end within {self._timeout_s:g} s")
            in_flight = [key for key in rollout_ids if key in self._running]
            return [self._take(key) for key in in_flight if self._running[key].finish_reason in _ABORTED]

    def lose(self, rollout_ids: Sequence[RolloutId] | None, failure: MidflightError) -> None:
        """Fail these requests, or all, with this error; requests that have ended are left alone."""
        with self._changed:
            ids = list(self._running) if rollout_ids is None else rollout_ids
            self._fail([self._running[key] for key in ids if key in self._running], failure)

    def _take(self, rollout_id: RolloutId) -> Completion:
        running = self._running.pop(rollout_id)
        return Completion(rollout_id, running.generated(), running.finish_reason or FinishReason.ABORT)

    def _fail(self, lost: Sequence[_Running], failure: MidflightError) -> None:
        with self._changed:
            for running in lost:
                if not running.has_ended:
                    running.failure = failure
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        self._ended.set()

    async def _open_all(self, requests: Sequence[GenerationRequest], bodies: Sequence[object]) -> None:
        results = await asyncio.gather(*map(self._open, bodies), return_exceptions=True)
        refused = [result for result in results if isinstance(result, BaseException)]
        accepted = [result for result in results if isinstance(result, httpx.Response)]
        if refused:
            await asyncio.gather(*(response.aclose() for response in accepted))
            raise refused[0]
        for request, response in zip(requests, accepted, strict=True):
            running = _Running.from_request(request)
            with self._changed:
                self._running[request.rollout_id] = running
            self._client.start(self._read(running, response))

    async def _open(self, body: object) -> httpx.Response:
        """Return the response as soon as its headers have arrived: the server has then accepted the request."""
        http_request = self._client.http.build_request("POST", "/v1/completions", json=body)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.http.send(http_request, stream=True)
            if response.is_success:
                return response
            await response.aread()
            raise refusal_of(response)
        except (httpx.HTTPError, ValueError, TimeoutError) as error:
            raise GenerationLostError(f"{http_request.url}: {reason_of(error)}") from error

    async def _read(self, running: _Running, response: httpx.Response) -> None:
        failure: MidflightError = GenerationLostError(f"{response.url}: the stream broke off")
        try:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._handle_event(running, json.loads(line.removeprefix("data: ")))
        except GenerationError as error:
            failure = error
        except (httpx.HTTPError, ValueError, KeyError) as error:
            failure = GenerationLostError(f"{response.url}: {reason_of(error)}")
        finally:
            self._fail([running], failure)  # no effect on a request that has ended
            await response.aclose()

    def _handle_event(self, running: _Running, event: dict[str, Any]) -> None:
        if "error" in event:
            raise GenerationError(event["error"]["message"])
        for choice in event["choices"]:
            with self._changed:
                versions = running.add_choice(choice)
                if running.has_ended:
                    self._notify()
            if versions:
                self._learn(max(versions))


def refusal_of(response: httpx.Response) -> MidflightError:
    """Convert an error response into one of our exceptions.

    Raises: ValueError if the response is not in the OpenAI format.
    """
    try:
        error = response.json()["error"]
        message, kind, code = error["message"], error["type"], error["code"]
    except (KeyError, TypeError) as unexpected:
        raise ValueError(f"status {response.status_code} with {response.text[:80]!r}") from unexpected
    if code == "weights_not_finite":
        return NonFiniteWeightsError(message)
    if kind == "weight_update_error" or code == "update_in_progress":
        return WeightUpdateError(message)
    return RequestError(message) if response.status_code < 500 else GenerationError(message)


def reason_of(error: Exception) -> str:
    """Text of an exception, or the name of its type if it has no text."""
    return str(error) or type(error).__name__
