"""HTTPReference: a Reference over a server that scores prompts.

consumes       answers to /v1/completions with `echo`
waits for      the scores of a whole microbatch, over a few parallel connections
unblocked by   the scores; a server that stays unreachable through all retries
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import httpx
import numpy as np

from midflight.errors import GenerationError, GenerationLostError
from midflight.generation.answers import reason_of, refusal_of
from midflight.generation.client import KEEPALIVE_S, model_of
from midflight.generation.schemas import CompletionResponse, Model, TextChoice
from midflight.types import Float32Array, Int32Array, Microbatch
from midflight.weights.engine_control import trusted_authorities

# Delays before the retries (seconds). Together about as long as a server takes to restart.
DEFAULT_BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
DEFAULT_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S = 10.0
# Tokens per request, unless a single sequence has more: far below any limit on bodies, and answered before a timeout.
_MAX_REQUEST_TOKENS = 1 << 14


class HTTPReference:
    """Implements Reference over a server. Close it, or use it in a `with` block.

    If the connection is lost, a request is repeated after each of the delays `backoff_s`. `timeout_s`: for an answer.
    """

    def __init__(
        self,
        url: str,
        temperature: float,
        *,
        api_key: str | None = None,
        num_connections: int = 4,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        backoff_s: Sequence[float] = DEFAULT_BACKOFF_S,
    ) -> None:
        """Connect to the server and read its limits.

        `temperature`: of the sampling distribution; log-probabilities are computed at this temperature. `api_key`: a
        key of the server, or its admin token.
        Raises: GenerationLostError if the server cannot be reached, or does not answer like a `midflight serve`.
        """
        self._url, self._temperature = url.rstrip("/"), temperature
        self._num_connections, self._backoff_s = num_connections, backoff_s
        self._version: int | None = None
        try:
            # Proxy settings of the environment do not apply to the machines of a run.
            self._http = httpx.Client(
                base_url=self._url,
                timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S)),
                limits=httpx.Limits(max_connections=num_connections, keepalive_expiry=KEEPALIVE_S),
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                trust_env=False,
                verify=trusted_authorities(),
            )
        except httpx.InvalidURL as error:
            raise GenerationLostError(f"{self._url} is not a URL: {error}") from error
        try:
            self.limits = self._read_limits()
        except BaseException:
            self._http.close()
            raise

    def logprobs(self, microbatch: Microbatch) -> Float32Array:
        """Score the tokens of a microbatch; 0 outside the loss mask.

        Raises: GenerationLostError if the server stays unreachable; GenerationError if it fails or has new weights.
        """
        positions = microbatch.sequence_positions()
        sequences = [microbatch.token_ids[np.concatenate(parts)] for parts in positions]
        with ThreadPoolExecutor(self._num_connections, thread_name_prefix="reference") as pool:
            answers = pool.map(self._score, self._requests(sequences))
            scores = [sequence_scores for answer in answers for sequence_scores in answer]
        logprobs = np.zeros(len(microbatch.token_ids), np.float32)
        for (prefix, own), scored in zip(positions, scores, strict=True):
            logprobs[own] = scored[len(prefix) :]
        logprobs[~microbatch.loss_mask] = 0
        return logprobs

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(self, sequences: Sequence[Int32Array]) -> Iterator[list[Int32Array]]:
        """Split the sequences into requests that keep all connections busy and respect the limits of the server."""
        max_sequences = min(self.limits.max_choices, math.ceil(len(sequences) / self._num_connections))
        request: list[Int32Array] = []
        for sequence in sequences:
            num_tokens = sum(map(len, request)) + len(sequence)
            if request and (len(request) == max_sequences or num_tokens > _MAX_REQUEST_TOKENS):
                yield request
                request = []
            request.append(sequence)
        yield request

    def _score(self, sequences: Sequence[Int32Array]) -> list[Float32Array]:
        """Return the log-probability of every token; NaN for the first token of each sequence."""
        body = {
            "prompt": [sequence.tolist() for sequence in sequences],
            "echo": True,
            "max_tokens": 0,
            "logprobs": 0,
            "temperature": self._temperature,
        }
        for wait_s in (*self._backoff_s, None):
            try:
                choices = self._choices(self._call("POST", "/v1/completions", body))
            except _ConnectionLostError as error:
                if wait_s is None:
                    raise GenerationLostError(f"the reference at {self._url} was lost: {error}") from error
                time.sleep(wait_s)
            else:
                return [self._logprobs(choice, sequence) for choice, sequence in zip(choices, sequences, strict=True)]
        raise AssertionError("the last attempt either succeeds or raises")

    def _choices(self, response: httpx.Response) -> list[TextChoice]:
        try:
            choices = CompletionResponse.model_validate_json(response.content).choices
        except ValueError as error:
            raise self._not_ours(response) from error
        if any(choice.finish_reason == "abort" for choice in choices):  # a server that stops aborts its requests
            raise _ConnectionLostError("the server was stopped")
        return choices

    def _logprobs(self, choice: TextChoice, sequence: Int32Array) -> Float32Array:
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
        if len(logprobs) != len(sequence):
            raise GenerationError(
                f"the reference at {self._url} scored {len(logprobs)} of the {len(sequence)} tokens of a sequence"
            )
        for version in choice.weight_versions:
            if self._version is None:
                self._version = version
            elif version != self._version:
                raise GenerationError(
                    f"the weights of the reference at {self._url} changed from version {self._version} to {version};"
                    " reference.url must name a server that nothing updates"
                )
        return np.array(logprobs, np.float32)  # None becomes NaN

    def _read_limits(self) -> Model:
        try:
            response = self._call("GET", "/v1/models")
        except _ConnectionLostError as error:
            raise GenerationLostError(f"{self._url} cannot be reached: {error}") from error
        try:
            return model_of(response.json())
        except ValueError as error:
            raise self._not_ours(response) from error

    def _call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Make a request and return the response.

        Raises: _ConnectionLostError if a retry may help, MidflightError if not.
        """
        try:
            response = self._http.request(method, path, json=body)
        except httpx.ReadTimeout as error:
            waited_s = self._http.timeout.read
            raise GenerationLostError(f"the reference at {self._url} did not answer within {waited_s:g} s") from error
        except httpx.HTTPError as error:
            raise _ConnectionLostError(reason_of(error)) from error
        if response.is_success:
            return response
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise _ConnectionLostError("its queue is full")
        try:
            refusal = refusal_of(response)
        except ValueError as error:
            raise self._not_ours(response) from error
        raise type(refusal)(f"{response.url}: {refusal}")

    def _not_ours(self, response: httpx.Response) -> GenerationLostError:
        return GenerationLostError(f"{response.url} does not answer like a `midflight serve`")


class _ConnectionLostError(Exception):
    """The server cannot be reached, or is stopping."""
