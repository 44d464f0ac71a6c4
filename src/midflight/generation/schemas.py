"""What goes over the wire: OpenAI's shapes, and what reinforcement learning needs beyond them.

Fields that OpenAI does not have carry a description. Unknown fields are refused: an option that is dropped silently is
worse than an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from midflight.types import TEMPERATURES, GeneratedTokens
from midflight.weights.buckets import DEFAULT_BUCKET_BYTES
from midflight.weights.process_group import DEFAULT_TIMEOUT_S

# Ids above are the server's own, for requests without one; all fit into the 53 bits that any JSON reader keeps.
NUM_ROLLOUT_IDS = 1 << 52

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Version = Annotated[int, Field(ge=0, lt=1 << 31, description="optimizer steps")]
RolloutIdField = Annotated[int, Field(ge=0, lt=NUM_ROLLOUT_IDS)]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


# --- requests ---------------------------------------------------------------------------------------------------


class Generated(Wire):
    """What an earlier attempt already sampled: per token its id, logprob (nats, float32) and weight version."""

    token_ids: list[TokenId]
    logprobs: list[Annotated[float, Field(ge=-1e38, le=1e38)]]
    weight_versions: list[Version]


class StreamOptions(Wire):
    include_usage: bool = False
    chunk_tokens: int = Field(1, ge=1, le=1 << 20, description="send a chunk every so many decode steps")


class GenerationOptions(Wire):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="default: the model that is served")
    n: int | None = Field(None, ge=1, description="default 1; choice i is rollout rollout_id + i")
    temperature: float | None = Field(
        None, ge=0, le=TEMPERATURES[1], description=f"default 1; 0 is greedy; else at least {TEMPERATURES[0]}"
    )
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31, description="sample from the top_k likeliest tokens; 0: all")
    min_p: float | None = Field(None, ge=0, le=1, description="drop tokens this much less likely than the likeliest")
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stop_token_ids: list[TokenId] | None = Field(
        None, description="tokens that end a response; default: the model's end-of-sequence tokens"
    )
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63, description="with the prompt, decides the samples")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="give token_ids, and prompt_token_ids")
    rollout_id: RolloutIdField | None = Field(
        None, description="samples are a function of (seed, rollout_id, position); default: of seed and prompt"
    )
    first_position: int = Field(
        0, ge=0, lt=1 << 31, description="of the first sampled token; later turns count on from the earlier ones"
    )
    generated: Generated | None = Field(None, description="go on after these tokens, as if never interrupted")
    min_weight_version: Version | None = Field(
        None, description="refuse, with 503, while the weights are older: a server that was started again, say"
    )
    user: str | None = None


class CompletionRequest(GenerationOptions):
    prompt: str | list[TokenId] | list[list[TokenId]]
    max_tokens: int | None = Field(
        None, ge=0, description="default: the most the server allows; 0 with echo: only score the prompt"
    )
    logprobs: int | None = Field(None, ge=0, le=1, description="0 or 1: give the sampled tokens' logprobs")
    echo: bool | None = Field(None, description="the prompt comes first, its tokens scored like sampled ones")


class TextPart(Wire):
    type: Literal["text"]
    text: str


class ChatMessage(Wire):
    role: str
    content: str | list[TextPart]
    name: str | None = None


class ChatRequest(GenerationOptions):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="default: the most the server allows")
    logprobs: bool | None = Field(None, description="give the sampled tokens' logprobs")


class AbortRequest(Wire):
    rollout_ids: list[Annotated[int, Field(ge=0, lt=1 << 53)]]


class InitProcessGroupRequest(Wire):
    master_address: str = Field(min_length=1, max_length=255, description="where rank 0 listens")
    master_port: int = Field(ge=1, le=65535)
    rank: int = Field(ge=1, lt=1 << 16, description="this server's rank; the sender is 0")
    world_size: int = Field(ge=2, le=1 << 16, description="the sender and all receivers")
    timeout_s: float = Field(DEFAULT_TIMEOUT_S, gt=0, le=3600, description="for joining and for every bucket, seconds")
    backend: Literal["gloo", "nccl"] = "gloo"


class WeightUpdateRequest(Wire):
    """Announces tensors, in the order they come in."""

    version: Version
    names: Annotated[list[str], Field(min_length=1)]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0, lt=1 << 40)]]]
    bucket_bytes: int = Field(DEFAULT_BUCKET_BYTES, ge=1, le=1 << 40, description="most bytes in one broadcast")


# --- responses --------------------------------------------------------------------------------------------------


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextLogprobs(BaseModel):
    """Per token; null where it is not a number, and for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]


class TokenLogprob(BaseModel):
    token: str
    logprob: float | None
    bytes: list[int] | None = None
    top_logprobs: list[TokenLogprob] = []


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "abort"] | None = None
    rollout_id: int
    weight_versions: list[int] = Field(description="per token, the weight version that sampled or scored it")
    token_ids: list[int] | None = None


class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] | None = "assistant"
    content: str


class MessageChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class DeltaChoice(Choice):
    delta: AssistantMessage
    logprobs: ChatLogprobs | None = None


class Response(BaseModel):
    id: str
    created: int = Field(description="seconds since 1970")
    model: str
    usage: Usage | None = None
    prompt_token_ids: list[int] | list[list[int]] | None = Field(None, description="a list per prompt if several came")


class CompletionResponse(Response):
    """A completion, or a chunk of one: chunks have the same shape."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class ChatResponse(Response):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[MessageChoice]


class ChatChunk(Response):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[DeltaChoice]


class AbortedRollout(BaseModel):
    """What it generated so far, in the shape of the field `generated`."""

    rollout_id: int
    token_ids: list[int]
    logprobs: list[float | None]
    weight_versions: list[int]


class AbortResponse(BaseModel):
    aborted: list[AbortedRollout]


class Status(BaseModel):
    status: Literal["ok", "paused"]
    weight_version: int
    in_flight: int


class InitProcessGroupResponse(BaseModel):
    rank: int
    world_size: int


class WeightUpdateResponse(BaseModel):
    version: int
    pause_s: float = Field(description="how long decoding stood still, seconds")
    seconds: float = Field(description="from the announcement until the weights were in use")
    bytes: int


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "midflight"
    vocab_size: int = Field(description="token ids are below this")
    max_length: int = Field(description="most tokens of a prompt and its response together")
    max_choices: int = Field(description="most choices of one request: its prompts times n")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorDetail


# --- tokens -----------------------------------------------------------------------------------------------------


def tokens_of(
    token_ids: Sequence[int], logprobs: Sequence[float | None], weight_versions: Sequence[int]
) -> GeneratedTokens:
    """Tokens from their lists on the wire. A log-probability of null becomes NaN."""
    return GeneratedTokens(
        np.array(token_ids, np.int32), np.array(logprobs, np.float32), np.array(weight_versions, np.int32)
    )


def lists_of(generated: GeneratedTokens) -> dict[str, list[Any]]:
    """The lists of `tokens_of`. A float32 survives the way through decimal digits exactly."""
    return {
        "token_ids": generated.token_ids.tolist(),
        "logprobs": generated.logprobs.tolist(),
        "weight_versions": generated.weight_versions.tolist(),
    }
