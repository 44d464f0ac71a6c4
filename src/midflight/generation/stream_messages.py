"""Messages of the rollout stream: one WebSocket per run and server, binary frames, each frame one msgpack message.

Arrays travel as bytes: token ids and weight versions as little-endian int32, log-probabilities as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from midflight.types import GeneratedTokens, GenerationRequest, Int32Array, RolloutId, SamplingParams

PATH = "/rollouts"

Refusal = Literal["request", "generation"]


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens. Raises: ValueError if the arrays do not have the same length."""

    token_ids: bytes
    logprobs: bytes
    weight_versions: bytes

    @classmethod
    def of(cls, generated: GeneratedTokens) -> Tokens:
        return cls(
            _int32(generated.token_ids),
            np.ascontiguousarray(generated.logprobs, "<f4").tobytes(),
            _int32(generated.weight_versions),
        )

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> GeneratedTokens:
        """Return the tokens of all parts as read-only arrays."""
        return GeneratedTokens(
            np.frombuffer(b"".join([part.token_ids for part in parts]), "<i4"),
            np.frombuffer(b"".join([part.logprobs for part in parts]), "<f4"),
            np.frombuffer(b"".join([part.weight_versions for part in parts]), "<i4"),
        )

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.weight_versions) or len(self.token_ids) % 4:
            raise ValueError("token ids, log-probabilities and weight versions are not arrays of the same length")

    def __len__(self) -> int:
        return len(self.token_ids) // 4

    def generated(self) -> GeneratedTokens:
        """Return the tokens as read-only arrays."""
        return self.joined([self])

    def last_version(self) -> int:
        """Weight version of the last token; there must be one."""
        return int.from_bytes(self.weight_versions[-4:], "little", signed=True)


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A GenerationRequest, without the fields that a server does not need."""

    rollout_id: int
    prompt: bytes
    sampling: SamplingParams
    seed: int
    first_position: int
    generated: Tokens | None

    @classmethod
    def of(cls, request: GenerationRequest) -> Request:
        return cls(
            request.rollout_id,
            _int32(request.prompt_token_ids),
            request.sampling,
            request.seed,
            request.first_position,
            Tokens.of(request.generated) if request.generated else None,
        )

    def generation_request(self) -> GenerationRequest:
        """Raises: ValueError if the bytes are not arrays of the expected form."""
        return GenerationRequest(
            RolloutId(self.rollout_id),
            np.frombuffer(self.prompt, "<i4"),
            self.sampling,
            self.seed,
            self.generated.generated() if self.generated else None,
            first_position=self.first_position,
        )


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Client: add these requests, all or none. Answered by a Reply with the same number, then by Chunks.

    `min_version`: oldest weights of the lineage that may sample; `lineage`: None for any.
    """

    number: int
    requests: list[Request]
    chunk_tokens: int
    lineage: str | None
    min_version: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Client: stop these rollouts. Their last Chunks come before the Reply."""

    number: int
    rollout_ids: list[int]


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Server: the outcome of the message with this number. `refusal`: the kind of error, or None."""

    number: int
    refusal: Refusal | None = None
    text: str = ""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one rollout; the last chunk has the value of a FinishReason, the others an empty text."""

    rollout_id: int
    tokens: Tokens
    finish_reason: str


class Chunks(msgspec.Struct, frozen=True, tag="chunks"):
    """Server: new tokens of some rollouts."""

    chunks: list[Chunk]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Server: generation has failed, and all rollouts with it."""

    text: str


FromClient = Add | Abort
FromServer = Reply | Chunks | Failed

encode = msgspec.msgpack.Encoder().encode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode
decode_from_server = msgspec.msgpack.Decoder(FromServer).decode


def _int32(array: Int32Array) -> bytes:
    return np.ascontiguousarray(array, "<i4").tobytes()
