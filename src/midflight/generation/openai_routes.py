"""/v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from midflight.errors import GenerationError
from midflight.generation.http_errors import ERROR_RESPONSES, ApiError, as_api_error
from midflight.generation.jobs import Job, Jobs, Part
from midflight.generation.schemas import (
    NUM_ROLLOUT_IDS,
    AssistantMessage,
    ChatChunk,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    DeltaChoice,
    ErrorResponse,
    Generated,
    GenerationOptions,
    MessageChoice,
    Model,
    ModelList,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    Usage,
)
from midflight.types import GeneratedTokens, GenerationRequest, Int32Array, RolloutId, SamplingParams

T = TypeVar("T")

_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
_CLIENT_CLOSED_REQUEST = 499  # nobody is there to see it


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served: the limits that requests are held to, and the tokenizer."""

    name: str
    tokenizer: Any
    vocab_size: int
    max_tokens: int  # per response
    max_samples: int  # per request


def openai_router(model: ServedModel, jobs: Jobs) -> APIRouter:
    router = APIRouter(tags=["generation"], responses=ERROR_RESPONSES)
    text = _Text(model.tokenizer)

    @router.post("/v1/completions", response_model=CompletionResponse, responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text or a list of token ids."""
        prompt = await text.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        reply = _CompletionReply(model.name, body, prompt, text)
        return await _answer(model, jobs, request, reply, body.max_tokens)

    @router.post("/v1/chat/completions", response_model=ChatResponse, responses=_STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation; the model's own chat template makes it a prompt."""
        prompt = await text.encode_chat([_plain(message) for message in body.messages])
        reply = _ChatReply(model.name, body, prompt, text)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return await _answer(model, jobs, request, reply, max_tokens)

    @router.get("/v1/models", response_model=ModelList)
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[Model(id=model.name)])

    return router


class _Text:
    """The tokenizer, off the event loop where a text can be long; one at a time, since it is not made for two."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._token_texts: dict[int, str] = {}

    async def encode(self, text: str) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._tokenizer.encode, text)

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Raises: ApiError 400 if there is no chat template, or it does not take these messages."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError(400, "the model's tokenizer has no chat template; /v1/completions would work")

        def encode() -> list[int]:
            token_ids: list[int] = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            return token_ids

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, encode)
        except Exception as error:  # whatever a template likes to raise
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def of_token(self, token_id: int) -> str:
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self._tokenizer.decode([token_id])
        return self._token_texts[token_id]


class _Reply:
    """How parts become a response or chunks of one."""

    def __init__(self, model: str, body: GenerationOptions, prompt: Sequence[int], text: _Text) -> None:
        self.body, self.prompt, self.text = body, prompt, text
        self._common: dict[str, Any] = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        if body.return_token_ids:
            self._common["prompt_token_ids"] = list(prompt)

    def response(self, parts: Sequence[Part], usage: Usage | None) -> str:
        raise NotImplementedError

    def chunk(self, parts: Sequence[Part], usage: Usage | None = None) -> str:
        """Empty `parts` for the chunk that has the usage."""
        raise NotImplementedError

    def _fields(self, part: Part) -> dict[str, Any]:
        return {
            "index": part.index,
            "finish_reason": part.finish_reason.value if part.finish_reason else None,
            "rollout_id": part.rollout_id,
            "weight_versions": part.generated.weight_versions.tolist(),
            "token_ids": part.generated.token_ids.tolist() if self.body.return_token_ids else None,
        }

    def _logprobs(self, part: Part) -> tuple[list[str], list[float | None]]:
        token_ids = part.generated.token_ids.tolist()
        return [self.text.of_token(token_id) for token_id in token_ids], finite_or_none(part.generated.logprobs)


class _CompletionReply(_Reply):
    body: CompletionRequest

    def response(self, parts: Sequence[Part], usage: Usage | None) -> str:
        choices = [
            TextChoice(**self._fields(part), text=part.text, logprobs=self._text_logprobs(part)) for part in parts
        ]
        return CompletionResponse(**self._common, choices=choices, usage=usage).model_dump_json()

    def chunk(self, parts: Sequence[Part], usage: Usage | None = None) -> str:
        chunk = self.response(parts, usage)
        self._common.pop("prompt_token_ids", None)  # once is enough
        return chunk

    def _text_logprobs(self, part: Part) -> TextLogprobs | None:
        if self.body.logprobs is None:
            return None
        tokens, logprobs = self._logprobs(part)
        return TextLogprobs(tokens=tokens, token_logprobs=logprobs)


class _ChatReply(_Reply):
    body: ChatRequest

    def __init__(self, model: str, body: ChatRequest, prompt: Sequence[int], text: _Text) -> None:
        super().__init__(model, body, prompt, text)
        self._begun: set[int] = set()  # choices whose role has been sent

    def response(self, parts: Sequence[Part], usage: Usage | None) -> str:
        choices = [
            MessageChoice(
                **self._fields(part), message=AssistantMessage(content=part.text), logprobs=self._chat_logprobs(part)
            )
            for part in parts
        ]
        return ChatResponse(**self._common, choices=choices, usage=usage).model_dump_json()

    def chunk(self, parts: Sequence[Part], usage: Usage | None = None) -> str:
        choices = []
        for part in parts:
            delta = AssistantMessage(role=None if part.index in self._begun else "assistant", content=part.text)
            self._begun.add(part.index)
            choices.append(DeltaChoice(**self._fields(part), delta=delta, logprobs=self._chat_logprobs(part)))
        chunk = ChatChunk(**self._common, choices=choices, usage=usage).model_dump_json()
        self._common.pop("prompt_token_ids", None)  # once is enough
        return chunk

    def _chat_logprobs(self, part: Part) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        pairs = zip(*self._logprobs(part), strict=True)
        return ChatLogprobs(content=[TokenLogprob(token=token, logprob=logprob) for token, logprob in pairs])


def _plain(message: ChatMessage) -> dict[str, str]:
    """As most templates want it: the parts of the content in one text."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": message.role, "content": text, **({"name": message.name} if message.name else {})}


def finite_or_none(logprobs: np.ndarray[Any, np.dtype[np.float32]]) -> list[float | None]:
    """JSON has no infinities. A float32 survives the way through decimal digits exactly."""
    return [value if math.isfinite(value) else None for value in logprobs.tolist()]


async def _answer(model: ServedModel, jobs: Jobs, request: Request, reply: _Reply, max_tokens: int | None) -> Response:
    body = reply.body
    requests = _generation_requests(model, body, reply.prompt, max_tokens)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stop):
        raise ApiError(400, "stop: an empty string would end every response at once", param="stop")
    options = body.stream_options
    chunk_tokens = (options.chunk_tokens if options else 1) if body.stream else None
    start = jobs.start(requests, reply.text.decode, stop, chunk_tokens=chunk_tokens, wait=body.rollout_id is None)
    if body.stream:
        job = await _unless_disconnected(request, start)
        if job is None:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        return _EventStream(job, _events(job, reply, bool(options and options.include_usage)))
    content = await _unless_disconnected(request, _whole(start, reply))
    if content is None:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    return Response(content, media_type="application/json")


async def _whole(start: Awaitable[Job], reply: _Reply) -> str:
    job = await start
    try:
        parts: dict[int, Part] = {}
        async for part in job.parts():
            before = parts.get(part.index)
            parts[part.index] = _joined(before, part) if before else part
    finally:
        job.close()
    in_order = [parts[index] for index in sorted(parts)]
    return reply.response(in_order, _usage(reply.prompt, sum(len(part.generated) for part in in_order)))


async def _events(job: Job, reply: _Reply, include_usage: bool) -> AsyncIterator[str]:
    """Server-sent events. An error after the first of them can only be an event itself."""
    num_tokens = 0
    try:
        async for part in job.parts():
            num_tokens += len(part.generated)
            yield f"data: {reply.chunk([part])}\n\n"
    except GenerationError as error:
        yield f"data: {ErrorResponse(error=as_api_error(error).detail).model_dump_json()}\n\n"
        return
    if include_usage:
        yield f"data: {reply.chunk([], _usage(reply.prompt, num_tokens))}\n\n"
    yield "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
    """Closes its job however it ends: sent, disconnected or broken."""

    def __init__(self, job: Job, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.close()


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The result, or None if the client goes away first; the work is then canceled."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, watch):
            each.cancel()


def _generation_requests(
    model: ServedModel, body: GenerationOptions, prompt: Sequence[int], max_tokens: int | None
) -> list[GenerationRequest]:
    """Raises: ApiError naming the field and the number that does not fit."""
    num_samples = body.n or 1
    if body.model not in (None, model.name):
        raise ApiError(
            404, f"there is no model {body.model!r}, only {model.name!r}", param="model", code="model_not_found"
        )
    if num_samples > model.max_samples:
        raise ApiError(400, f"n is {num_samples}, not 1 to {model.max_samples}", param="n")
    if body.generated and num_samples > 1:
        raise ApiError(400, f"n is {num_samples}, but only one sample can go on after `generated`", param="n")
    if body.rollout_id is not None and body.rollout_id + num_samples > NUM_ROLLOUT_IDS:
        raise ApiError(400, f"rollout_id + n is above {NUM_ROLLOUT_IDS}", param="rollout_id")
    stop_token_ids = body.stop_token_ids
    if stop_token_ids is None:
        stop_token_ids = [] if model.tokenizer.eos_token_id is None else [model.tokenizer.eos_token_id]
    generated = _generated_tokens(body.generated) if body.generated else None
    _check_token_ids("stop_token_ids", stop_token_ids, model.vocab_size)
    _check_token_ids("prompt", prompt, model.vocab_size)
    if generated:
        _check_token_ids("generated.token_ids", generated.token_ids.tolist(), model.vocab_size)
    sampling = SamplingParams(
        max_tokens=model.max_tokens if max_tokens is None else max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        stop_token_ids=tuple(stop_token_ids),
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
    )
    seed = secrets.randbits(63) if body.seed is None else body.seed
    prompt_token_ids = np.array(prompt, np.int32)
    first = _own_rollout_id(seed, prompt_token_ids) if body.rollout_id is None else RolloutId(body.rollout_id)
    request = GenerationRequest(first, prompt_token_ids, sampling, seed, generated)
    return [replace(request, rollout_id=RolloutId(first + index)) for index in range(num_samples)]


def _check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    worst = max(token_ids, default=0)
    if worst >= vocab_size:
        raise ApiError(400, f"{field}: token id {worst} is not in 0 to {vocab_size - 1}", param=field)


def _own_rollout_id(seed: int, prompt: Int32Array) -> RolloutId:
    """The same for the same seed and prompt, so that a seed alone makes a request repeatable."""
    digest = hashlib.blake2b(seed.to_bytes(9, "little", signed=True) + prompt.tobytes(), digest_size=6).digest()
    return RolloutId(NUM_ROLLOUT_IDS + int.from_bytes(digest, "little"))


def _generated_tokens(generated: Generated) -> GeneratedTokens | None:
    num_tokens = len(generated.token_ids)
    for name in ("logprobs", "weight_versions"):
        length = len(getattr(generated, name))
        if length != num_tokens:
            raise ApiError(400, f"generated: {num_tokens} token_ids but {length} {name}", param=f"generated.{name}")
    if not num_tokens:
        return None
    return GeneratedTokens(
        np.array(generated.token_ids, np.int32),
        np.array(generated.logprobs, np.float32),
        np.array(generated.weight_versions, np.int32),
    )


def _joined(first: Part, second: Part) -> Part:
    arrays = (
        np.concatenate((getattr(first.generated, name), getattr(second.generated, name)))
        for name in ("token_ids", "logprobs", "weight_versions")
    )
    return replace(second, text=first.text + second.text, generated=GeneratedTokens(*arrays))


def _usage(prompt: Sequence[int], num_tokens: int) -> Usage:
    return Usage(prompt_tokens=len(prompt), completion_tokens=num_tokens, total_tokens=len(prompt) + num_tokens)
