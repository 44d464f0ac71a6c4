"""/v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from midflight.errors import GenerationError
from midflight.generation.http_errors import ERROR_RESPONSES, ApiError, as_api_error
from midflight.generation.jobs import Job, Jobs, Part
from midflight.generation.replies import ChatReply, CompletionReply, Reply, joined, usage_of
from midflight.generation.request_parsing import ServedModel, Tokenizing, check_echo, generation_requests
from midflight.generation.schemas import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    Model,
    ModelList,
)

T = TypeVar("T")

_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_CLIENT_CLOSED_REQUEST = 499  # nobody is there to see it


def openai_router(model: ServedModel, jobs: Jobs) -> APIRouter:
    router = APIRouter(tags=["generation"], responses=ERROR_RESPONSES)
    text = Tokenizing(model.tokenizer)

    @router.post("/v1/completions", response_model=CompletionResponse, responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text or a list of token ids, or several such lists; with `echo`, say how likely they are."""
        check_echo(body)
        reply = CompletionReply(model.name, body, await _prompts(body, text), text)
        return await _answer(model, jobs, request, reply, body.max_tokens, echo=bool(body.echo))

    @router.post("/v1/chat/completions", response_model=ChatResponse, responses=_STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation; the model's own chat template makes it a prompt."""
        reply = ChatReply(model.name, body, [await text.encode_chat(body.messages)], text)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return await _answer(model, jobs, request, reply, max_tokens)

    @router.get("/v1/models", response_model=ModelList)
    async def models() -> ModelList:
        """The one model that is served."""
        limits = {"max_length": model.max_length, "max_choices": model.max_samples}
        return ModelList(data=[Model(id=model.name, vocab_size=model.vocab_size, **limits)])

    return router


async def _prompts(body: CompletionRequest, text: Tokenizing) -> list[list[int]]:
    if isinstance(body.prompt, str):
        return [await text.encode(body.prompt)]
    several = [each for each in body.prompt if isinstance(each, list)]
    return several or [[each for each in body.prompt if isinstance(each, int)]]


async def _answer(
    model: ServedModel, jobs: Jobs, request: Request, reply: Reply, max_tokens: int | None, *, echo: bool = False
) -> Response:
    body = reply.body
    requests = generation_requests(model, body, reply.prompts, max_tokens, score_prompts=echo)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stop):
        raise ApiError(400, "stop: an empty string would end every response at once", param="stop")
    if body.min_weight_version is not None and jobs.driver.weight_version < body.min_weight_version:
        raise ApiError(
            503,
            f"the weights are of version {jobs.driver.weight_version}, and {body.min_weight_version} is asked for",
            param="min_weight_version",
            code="weights_too_old",
        )
    options = body.stream_options
    chunk_tokens = (options.chunk_tokens if options else 1) if body.stream else None
    start = jobs.start(requests, reply.text.decode, stop, chunk_tokens=chunk_tokens, wait=body.rollout_id is None)
    answer = _stream(start, reply, bool(options and options.include_usage)) if body.stream else _whole(start, reply)
    return await _unless_disconnected(request, answer) or Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _stream(start: Awaitable[Job], reply: Reply, include_usage: bool) -> Response:
    job = await start
    return _EventStream(job, _events(job, reply, include_usage))


async def _whole(start: Awaitable[Job], reply: Reply) -> Response:
    job = await start
    try:
        parts: dict[int, Part] = {}
        async for part in job.parts():
            before = parts.get(part.index)
            parts[part.index] = joined(before, part) if before else part
    finally:
        job.close()
    in_order = [parts[index] for index in sorted(parts)]
    content = reply.response(in_order, usage_of(reply.prompts, sum(len(part.generated) for part in in_order)))
    return Response(content, media_type="application/json")


async def _events(job: Job, reply: Reply, include_usage: bool) -> AsyncIterator[str]:
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
        yield f"data: {reply.chunk([], usage_of(reply.prompts, num_tokens))}\n\n"
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
