"""Bodies of completion and chat requests: OpenAI's fields, with additional fields for reinforcement learning.

Clients send some fields that this server does not support, with values that change nothing. Such a value is accepted;
any other value is refused by name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from midflight.generation.schemas import Generated, Items, Lineage, RolloutIdField, TokenId, Version, Wire
from midflight.types import TEMPERATURES


def _only(*supported: object, advice: str = "") -> AfterValidator:
    """Return a validator that refuses every value except null and the supported ones."""
    context = {"values": " or ".join(map(json.dumps, supported)), "advice": advice and f"; {advice}"}

    def check(value: Any) -> Any:
        if value is not None and value not in supported:
            raise PydanticCustomError("unsupported_value", "only {values} is supported{advice}", context)
        return value

    return AfterValidator(check)


def _no_bias(value: dict[str, float] | None) -> dict[str, float] | None:
    if value and any(value.values()):
        raise PydanticCustomError("unsupported_value", "only an empty object or zeros are supported")
    return value


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MAX_ENTRIES:
        raise PydanticCustomError("too_long", "at most {number} entries are supported", {"number": _MAX_ENTRIES})
    return value


_MAX_ENTRIES = 1024  # of an object whose keys the client chooses; each wrong one is an error
Few = BeforeValidator(_few)
_SAMPLED_ONLY = "the engine returns the log-probability of the sampled token only"
_NEUTRAL = "only this value is supported: "

Penalty = Annotated[float | None, _only(0)]


class StreamOptions(Wire):
    """Options of a streamed response."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = Field(None, description="ignored")
    chunk_tokens: int = Field(1, ge=1, le=1 << 20, description="number of decode steps per chunk")


class GenerationOptions(Wire):
    """Fields common to completions and chat completions."""

    model: str | None = Field(None, description="default: the model of the server")
    n: int | None = Field(None, ge=1, description="default 1; choice i is rollout rollout_id + i")
    temperature: float | None = Field(
        None, ge=0, le=TEMPERATURES[1], description=f"default 1; 0 is greedy; else at least {TEMPERATURES[0]}"
    )
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(
        None, ge=-1, lt=1 << 31, description="sample from the top_k most likely tokens; 0 or -1: all"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="smallest probability of a token, relative to the most likely token"
    )
    stop: str | Annotated[Items[str], Field(max_length=16)] | None = None
    stop_token_ids: Items[TokenId] | None = Field(
        None, description="tokens that end a response; default: the model's end-of-sequence tokens"
    )
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63, description="same seed and prompt: same samples")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="include token_ids and prompt_token_ids in the response")
    rollout_id: RolloutIdField | None = Field(
        None,
        description="samples are a function of (seed, rollout_id, position); default: derived from seed and prompt",
    )
    first_position: int = Field(
        0,
        ge=0,
        lt=1 << 31,
        description="position of the first sampled token; a later turn continues the count of the earlier turns",
    )
    generated: Generated | None = Field(None, description="continue after these tokens, as if never interrupted")
    min_weight_version: Version | None = Field(
        None, description="refuse the request with 503 while the weights are older, for example after a restart"
    )
    weight_lineage: Lineage | None = Field(
        None, description="refuse the request with 503 while the weights are of another lineage"
    )
    frequency_penalty: Penalty = Field(None, description=f"{_NEUTRAL}0")
    presence_penalty: Penalty = Field(None, description=f"{_NEUTRAL}0")
    repetition_penalty: Annotated[float | None, _only(1)] = Field(None, description=f"{_NEUTRAL}1")
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(_no_bias), Few] = Field(
        None, description="only an empty object or zeros are supported"
    )
    user: str | None = Field(None, description="ignored")


class CompletionRequest(GenerationOptions):
    """Body of POST /v1/completions."""

    prompt: str | Items[TokenId] | Items[Items[TokenId]] | Items[str]
    max_tokens: int | None = Field(
        None, ge=0, description="default: the server's maximum; 0 with echo: only score the prompt"
    )
    logprobs: Annotated[int | None, _only(0, 1, advice=_SAMPLED_ONLY)] = Field(
        None, description="0 or 1: include the logprobs of the sampled tokens"
    )
    echo: bool | None = Field(None, description="put the prompt first, with its tokens scored like sampled tokens")
    best_of: Annotated[int | None, _only(1, advice="n returns several choices")] = Field(
        None, description=f"{_NEUTRAL}1"
    )
    suffix: Annotated[str | None, _only("")] = Field(None, description=f'{_NEUTRAL}""')


class TextPart(Wire):
    """Part of the content of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Wire):
    """Call of a function by the model; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Wire):
    """Call of a tool in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Wire):
    """One message of a conversation."""

    role: str
    content: str | Items[TextPart] | None = Field(None, description="null only in messages of the assistant")
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = Field(None, description="call that a message of a tool answers")
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[Items[Any] | None, _only([])] = Field(None, description=f"{_NEUTRAL}[]")


class ToolFunction(Wire):
    """Description of a function for the chat template; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, _only(False)] = Field(None, description=f"{_NEUTRAL}false")


class Tool(Wire):
    """Tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class ChatRequest(GenerationOptions):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="default: the server's maximum")
    logprobs: bool | None = Field(None, description="include the logprobs of the sampled tokens")
    top_logprobs: Annotated[int | None, _only(0, advice=_SAMPLED_ONLY)] = Field(None, description=f"{_NEUTRAL}0")
    tools: Items[Tool] | None = Field(None, description="given to the chat template; calls in the answer remain text")
    tool_choice: Annotated[str | dict[str, Any] | None, _only("auto", "none")] = Field(
        None, description="auto, or none: the template gets no tools"
    )
    parallel_tool_calls: Annotated[bool | None, _only(True)] = Field(None, description=f"{_NEUTRAL}true")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="arguments of the chat template")
    response_format: Annotated[dict[str, Any] | None, _only({"type": "text"})] = Field(
        None, description=f'{_NEUTRAL}{{"type": "text"}}'
    )
    modalities: Annotated[Items[str] | None, _only(["text"])] = Field(None, description=f'{_NEUTRAL}["text"]')
    verbosity: Annotated[str | None, _only("medium")] = Field(None, description=f'{_NEUTRAL}"medium"')
    metadata: Annotated[dict[str, str] | None, Few] = Field(None, description="ignored")
    store: bool | None = Field(None, description="ignored")
    service_tier: str | None = Field(None, description="ignored")
    prompt_cache_key: str | None = Field(None, description="ignored")
    safety_identifier: str | None = Field(None, description="ignored")
