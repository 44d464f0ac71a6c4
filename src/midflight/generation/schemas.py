"""JSON bodies of responses and of control requests: OpenAI's formats with fields for reinforcement learning.

Additional fields have a description. Unknown fields are refused: an error is better than an option that is silently
ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from midflight.types import GeneratedTokens
from midflight.weights.buckets import DEFAULT_BUCKET_BYTES
from midflight.weights.engine_control import PROTOCOL
from midflight.weights.process_group import DEFAULT_TIMEOUT_S

# Rollout ids of clients are below this. The server gives larger ids to requests without one. All ids fit into 53 bits,
# which every JSON parser represents exactly.
NUM_ROLLOUT_IDS = 1 << 52

T = TypeVar("T")

# A list of a request. Its first wrong item is reported: a body may have a million of them.
Items = Annotated[list[T], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Version = Annotated[int, Field(ge=0, lt=1 << 31, description="optimizer steps")]
Lineage = Annotated[
    str,
    Field(max_length=255, description="name of a series of versions; weights of another lineage replace all others"),
]
RolloutIdField = Annotated[int, Field(ge=0, lt=NUM_ROLLOUT_IDS)]


class Wire(BaseModel):
    """Base of all request bodies: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def keep_one_unknown_field(cls, values: Any) -> Any:
        """Drop all unknown fields but the first, whose error suffices: a body may have a million of them."""
        if not isinstance(values, dict):
            return values
        unknown = values.keys() - cls.model_fields.keys()
        if len(unknown) < 2:
            return values
        first = next(name for name in values if name in unknown)
        return {name: value for name, value in values.items() if name == first or name not in unknown}


# --- requests ---------------------------------------------------------------------------------------------------


class Generated(Wire):
    """Tokens sampled by an earlier attempt: per token its id, log-probability (float32, nats) and weight version."""

    token_ids: Items[TokenId]
    logprobs: Items[Annotated[float, Field(ge=-1e38, le=1e38)]]
    weight_versions: Items[Version]


class AbortRequest(Wire):
    """Body of POST /abort."""

    rollout_ids: Items[Annotated[int, Field(ge=0, lt=1 << 53)]]


class InitProcessGroupRequest(Wire):
    """Body of POST /init_process_group."""

    master_address: str = Field(min_length=1, max_length=255, description="address that rank 0 listens on")
    master_port: int = Field(ge=1, le=65535)
    rank: int = Field(ge=1, lt=1 << 16, description="rank of this server; the sender has rank 0")
    world_size: int = Field(ge=2, le=1 << 16, description="number of processes: the sender and all receivers")
    token: str = Field(
        min_length=32,
        max_length=256,
        repr=False,
        description="secret of this group; all of its members prove to know it",
    )
    timeout_s: float = Field(
        DEFAULT_TIMEOUT_S, gt=0, le=3600, description="timeout for joining and for every bucket, seconds"
    )
    backend: Literal["tcp", "nccl"] = "tcp"
    protocol: int = Field(PROTOCOL, description="version of this contract that the sender follows")


class WeightUpdateRequest(Wire):
    """Body of POST /request_weight_update: announces tensors in the order of their transfer.

    Without tensors, the request gives weights that the server has a new version.
    """

    version: Version
    names: Items[str]
    dtypes: Items[str]
    shapes: Items[Items[Annotated[int, Field(ge=0, lt=1 << 40)]]]
    bucket_bytes: int = Field(DEFAULT_BUCKET_BYTES, ge=1, le=1 << 40, description="largest broadcast, bytes")
    lineage: Lineage = ""
    content: Version | None = Field(
        None, description="the version that changed the tensors last, optimizer steps; default: version"
    )
    adopt: bool = Field(True, description="answer when the weights are in use; false: answer when they are staged")


class AdoptRequest(Wire):
    """Body of POST /adopt: sample with this version, or a newer one of the lineage, as soon as it has arrived."""

    version: Version
    lineage: Lineage | None = Field(None, description="default: the lineage of the weights in use")


# --- responses --------------------------------------------------------------------------------------------------


class Usage(BaseModel):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextLogprobs(BaseModel):
    """Log-probabilities of the tokens of a completion; null if not finite, and for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]


class TokenLogprob(BaseModel):
    """Log-probability of one token of a chat completion; null if not finite."""

    token: str
    logprob: float | None
    bytes: list[int] | None = None
    top_logprobs: list[TokenLogprob] = []


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of a chat completion."""

    content: list[TokenLogprob]


class Choice(BaseModel):
    """Fields common to the choices of all responses."""

    index: int
    finish_reason: Literal["stop", "length", "abort"] | None = None
    rollout_id: int
    weight_versions: list[int] = Field(description="for each token, the weight version that sampled or scored it")
    token_ids: list[int] | None = None


class TextChoice(Choice):
    """One choice of a completion, or its next part in a chunk."""

    text: str
    logprobs: TextLogprobs | None = None


class AssistantMessage(BaseModel):
    """Message of the model; a chunk has the role only at the start of a choice."""

    role: Literal["assistant"] | None = "assistant"
    content: str


class MessageChoice(Choice):
    """One choice of a chat completion."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class DeltaChoice(Choice):
    """Next part of one choice in a chunk of a chat completion."""

    delta: AssistantMessage
    logprobs: ChatLogprobs | None = None


class Response(BaseModel):
    """Fields common to all responses and chunks."""

    id: str
    created: int = Field(description="seconds since 1970")
    model: str
    usage: Usage | None = None
    prompt_token_ids: list[int] | list[list[int]] | None = Field(
        None, description="one list for each prompt if the request has several prompts"
    )


class CompletionResponse(Response):
    """A completion, or a chunk of a completion, which has the same fields."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class ChatResponse(Response):
    """A chat completion."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[MessageChoice]


class ChatChunk(Response):
    """A chunk of a chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[DeltaChoice]


class AbortedRollout(BaseModel):
    """Tokens of an aborted rollout, in the format of the field `generated`."""

    rollout_id: int
    token_ids: list[int]
    logprobs: list[float | None]
    weight_versions: list[int]


class AbortResponse(BaseModel):
    """The rollouts that were in flight and are now aborted."""

    aborted: list[AbortedRollout]


class Status(BaseModel):
    """State of a server; `in_flight` counts sequences.

    `lineage`, `content`: of the weights in use. `staged_...`: of weights that have arrived and are not in use yet.
    """

    status: Literal["ok", "paused"]
    in_flight: int
    num_slots: int | None = Field(None, description="sequences that are generated at a time; more wait")
    protocol: int = PROTOCOL
    backends: list[str] = Field(description="backends of a process group that the server can join")
    weight_version: int
    lineage: str
    content: int
    staged_version: int | None
    staged_lineage: str | None
    staged_content: int | None


class InitProcessGroupResponse(BaseModel):
    """The process group that the server has joined. Members that were late are not counted."""

    rank: int
    world_size: int


class WeightUpdateResponse(BaseModel):
    """Result of a weight update."""

    version: int
    pause_s: float = Field(description="duration of the decode step that adopted the weights; 0 without adopt, seconds")
    seconds: float = Field(description="time from the announcement to this answer, seconds")
    bytes: int


class AdoptResponse(BaseModel):
    """The weights that a server samples with."""

    version: int
    lineage: str


class Model(BaseModel):
    """The model of a server and its limits."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "midflight"
    vocab_size: int = Field(description="token ids are below this")
    max_length: int = Field(description="largest number of tokens of a prompt and its response together")
    max_choices: int = Field(description="largest number of choices of one request: number of prompts times n")


class ModelList(BaseModel):
    """Answer to GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    """An error; `param` is the wrong field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Body of every error response."""

    error: ErrorDetail


# --- tokens -----------------------------------------------------------------------------------------------------


def tokens_of(
    token_ids: Sequence[int], logprobs: Sequence[float | None], weight_versions: Sequence[int]
) -> GeneratedTokens:
    """Convert lists from JSON to tokens; a log-probability of null becomes NaN."""
    return GeneratedTokens(
        np.array(token_ids, np.int32), np.array(logprobs, np.float32), np.array(weight_versions, np.int32)
    )


def lists_of(generated: GeneratedTokens) -> dict[str, list[Any]]:
    """Convert tokens to lists for JSON, the inverse of `tokens_of`; JSON keeps every finite float32 exactly."""
    return {
        "token_ids": generated.token_ids.tolist(),
        "logprobs": generated.logprobs.tolist(),
        "weight_versions": generated.weight_versions.tolist(),
    }
