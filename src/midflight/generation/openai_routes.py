"""OpenAI routes: /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from midflight.errors import GenerationError
from midflight.generation.disconnects import CLIENT_CLOSED_REQUEST, unless_disconnected
from midflight.generation.http_errors import BEARER, CALLER, ERROR_RESPONSES, ApiError, as_api_error, require_admin
from midflight.generation.request_parsing import (
    AsyncTokenizer,
    ServedModel,
    check_echo,
    check_model_name,
    check_num_choices,
    generation_requests,
)
from midflight.generation.request_schemas import ChatRequest, CompletionRequest, GenerationOptions
from midflight.generation.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
    merge_deltas,
    usage_of,
)
from midflight.generation.schemas import ChatResponse, CompletionResponse, ErrorResponse, Model, ModelList
from midflight.generation.served_requests import Delta, ServedRequest, ServedRequests
from midflight.types import WeightLabel

# Fields with which a stranger could take the id of a rollout of the run, or make the server wait for weights.
_RUN_FIELDS = ("rollout_id", "generated", "weight_lineage", "min_weight_version")
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def openai_router(model: ServedModel, served_requests: ServedRequests) -> APIRouter:
    """Create the OpenAI routes."""
    # The gate checks the key. The dependency documents it.
    router = APIRouter(tags=["generation"], responses=ERROR_RESPONSES, dependencies=[Depends(BEARER)])
    text = AsyncTokenizer(model.tokenizer, model.max_length)

    @router.post("/v1/completions", response_model=CompletionResponse, responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts, as texts or token ids; with `echo`, score the prompts as well."""
        check_echo(body)
        builder = CompletionResponseBuilder(model.name, body, await _prompts(body, text, model), text)
        return await _answer(model, served_requests, request, builder, body.max_tokens, echo=bool(body.echo))

    @router.post("/v1/chat/completions", response_model=ChatResponse, responses=_STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation; the model's chat template renders it as a prompt."""
        builder = ChatResponseBuilder(model.name, body, [await text.encode_chat(body)], text)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return await _answer(model, served_requests, request, builder, max_tokens)

    @router.get("/v1/models", response_model=ModelList)
    async def models() -> ModelList:
        """List the one model of this server."""
        return ModelList(data=[_described(model)])

    @router.get("/v1/models/{model_id:path}", response_model=Model)
    async def model_by_id(model_id: str) -> Model:
        """Describe the model of this server."""
        check_model_name(model, model_id)
        return _described(model)

    return router


def _described(model: ServedModel) -> Model:
    limits = {"max_length": model.max_length, "max_choices": model.max_samples}
    return Model(id=model.name, vocab_size=model.vocab_size, **limits)


async def _prompts(body: CompletionRequest, text: AsyncTokenizer, model: ServedModel) -> list[list[int]]:
    if isinstance(body.prompt, str):
        return await text.encode([body.prompt])
    if texts := [prompt for prompt in body.prompt if isinstance(prompt, str)]:
        check_num_choices(model, body.n or 1, len(texts))  # before all of them are tokenized
        return await text.encode(texts)
    prompts = [prompt for prompt in body.prompt if isinstance(prompt, list)]
    return prompts or [[token_id for token_id in body.prompt if isinstance(token_id, int)]]


async def _answer(
    model: ServedModel,
    served_requests: ServedRequests,
    request: Request,
    builder: ResponseBuilder,
    max_tokens: int | None,
    *,
    echo: bool = False,
) -> Response:
    body, caller = builder.body, request.scope[CALLER]
    if any(getattr(body, name) is not None for name in _RUN_FIELDS):
        require_admin(request)
    requests = generation_requests(model, body, builder.prompts, max_tokens, score_prompts=echo)
    stop = requests[0].sampling.stop
    _check_weights(body, served_requests.driver.active)
    options = body.stream_options
    chunk_tokens = (options.chunk_tokens if options else 1) if body.stream else None
    start = served_requests.start(
        requests,
        builder.text.decode,
        builder.text.stop_rules(stop) if stop else None,
        chunk_tokens=chunk_tokens,
        unique=body.rollout_id is not None,
        client=None if caller.is_admin else caller.name,
    )
    answer = _stream(start, builder, bool(options and options.include_usage)) if body.stream else _whole(start, builder)
    return await unless_disconnected(request, answer) or Response(status_code=CLIENT_CLOSED_REQUEST)


def _check_weights(body: GenerationOptions, weights: WeightLabel) -> None:
    if body.weight_lineage is not None and body.weight_lineage != weights.lineage:
        message = f"weight_lineage is {body.weight_lineage!r}, but the weights are of lineage {weights.lineage!r}"
        raise ApiError(503, f"{message}; update them", param="weight_lineage", code="weights_too_old")
    if body.min_weight_version is not None and weights.version < body.min_weight_version:
        message = f"min_weight_version is {body.min_weight_version}, but the weights have version {weights.version}"
        raise ApiError(503, f"{message}; update them", param="min_weight_version", code="weights_too_old")


async def _stream(start: Awaitable[ServedRequest], builder: ResponseBuilder, include_usage: bool) -> Response:
    served = await start
    return _EventStream(served, _events(served, builder, include_usage))


async def _whole(start: Awaitable[ServedRequest], builder: ResponseBuilder) -> Response:
    served = await start
    try:
        deltas: dict[int, Delta] = {}
        async for delta in served.deltas():
            before = deltas.get(delta.index)
            deltas[delta.index] = merge_deltas(before, delta) if before else delta
    finally:
        served.close()
    in_order = [deltas[index] for index in sorted(deltas)]
    content = builder.response(in_order, usage_of(builder.prompts, sum(len(delta.generated) for delta in in_order)))
    return Response(content, media_type="application/json")


async def _events(served: ServedRequest, builder: ResponseBuilder, include_usage: bool) -> AsyncIterator[str]:
    """Yield the server-sent events. An error is sent as an event, because the status has been sent already."""
    num_tokens = 0
    try:
        async for delta in served.deltas():
            num_tokens += len(delta.generated)
            yield f"data: {builder.chunk([delta])}\n\n"
    except GenerationError as error:
        yield f"data: {ErrorResponse(error=as_api_error(error).detail).model_dump_json()}\n\n"
        return
    if include_usage:
        yield f"data: {builder.chunk([], usage_of(builder.prompts, num_tokens))}\n\n"
    yield "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
    """Stream of events that always closes its request: after the last event, a disconnect or an error."""

    def __init__(self, served: ServedRequest, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._served.close()
