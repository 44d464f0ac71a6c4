"""OpenAI responses and chunks, built from deltas of generated text."""

from __future__ import annotations

import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from midflight.generation.request_parsing import AsyncTokenizer
from midflight.generation.request_schemas import ChatRequest, CompletionRequest, GenerationOptions
from midflight.generation.schemas import (
    AssistantMessage,
    ChatChunk,
    ChatLogprobs,
    ChatResponse,
    CompletionResponse,
    DeltaChoice,
    MessageChoice,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    Usage,
)
from midflight.generation.served_requests import Delta
from midflight.types import Float32Array, GeneratedTokens


class ResponseBuilder(ABC):
    """Builds the response to one HTTP request from deltas: at once, or in chunks."""

    def __init__(
        self, model: str, body: GenerationOptions, prompts: Sequence[Sequence[int]], text: AsyncTokenizer
    ) -> None:
        self.body, self.prompts, self.text = body, prompts, text
        self._common: dict[str, Any] = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        if body.return_token_ids:
            self._common["prompt_token_ids"] = list(prompts[0] if len(prompts) == 1 else prompts)

    @abstractmethod
    def response(self, deltas: Sequence[Delta], usage: Usage | None) -> str:
        """Return the whole response as JSON, from one delta per choice."""

    @abstractmethod
    def chunk(self, deltas: Sequence[Delta], usage: Usage | None = None) -> str:
        """Return one chunk of a stream as JSON. `deltas` is empty for the chunk with the usage."""

    def _fields(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "finish_reason": delta.finish_reason.value if delta.finish_reason else None,
            "rollout_id": delta.rollout_id,
            "weight_versions": delta.generated.weight_versions.tolist(),
            "token_ids": delta.generated.token_ids.tolist() if self.body.return_token_ids else None,
        }

    def _logprobs(self, delta: Delta) -> tuple[list[str], list[float | None]]:
        token_ids = delta.generated.token_ids.tolist()
        return [self.text.token_text(token_id) for token_id in token_ids], finite_or_none(delta.generated.logprobs)


class CompletionResponseBuilder(ResponseBuilder):
    """Builds responses of /v1/completions."""

    body: CompletionRequest

    def response(self, deltas: Sequence[Delta], usage: Usage | None) -> str:
        choices = [
            TextChoice(**self._fields(delta), text=delta.text, logprobs=self._text_logprobs(delta))
            for delta in map(self._with_prompt, deltas)
        ]
        return CompletionResponse(**self._common, choices=choices, usage=usage).model_dump_json()

    def chunk(self, deltas: Sequence[Delta], usage: Usage | None = None) -> str:
        chunk = self.response(deltas, usage)
        self._common.pop("prompt_token_ids", None)  # only the first chunk has them
        return chunk

    def _with_prompt(self, delta: Delta) -> Delta:
        """Put the scored prompt before the text and tokens of the delta."""
        if delta.prompt is None:  # nothing to echo, or the request was aborted before its prompt was scored
            return delta
        prompt = self.body.prompt
        texts = [prompt] if isinstance(prompt, str) else [text for text in prompt if isinstance(text, str)]
        index = delta.index // (self.body.n or 1)
        text = texts[index] if texts else self.text.decode(delta.prompt.token_ids.tolist())
        return merge_deltas(replace(delta, text=text, generated=delta.prompt), delta)

    def _text_logprobs(self, delta: Delta) -> TextLogprobs | None:
        if self.body.logprobs is None:
            return None
        tokens, logprobs = self._logprobs(delta)
        return TextLogprobs(tokens=tokens, token_logprobs=logprobs)


class ChatResponseBuilder(ResponseBuilder):
    """Builds responses of /v1/chat/completions."""

    body: ChatRequest

    def __init__(self, model: str, body: ChatRequest, prompts: Sequence[Sequence[int]], text: AsyncTokenizer) -> None:
        super().__init__(model, body, prompts, text)
        self._begun: set[int] = set()  # choices whose role has been sent

    def response(self, deltas: Sequence[Delta], usage: Usage | None) -> str:
        choices = [
            MessageChoice(
                **self._fields(delta), message=AssistantMessage(content=delta.text), logprobs=self._chat_logprobs(delta)
            )
            for delta in deltas
        ]
        return ChatResponse(**self._common, choices=choices, usage=usage).model_dump_json()

    def chunk(self, deltas: Sequence[Delta], usage: Usage | None = None) -> str:
        choices = []
        for delta in deltas:
            message = AssistantMessage(role=None if delta.index in self._begun else "assistant", content=delta.text)
            self._begun.add(delta.index)
            choices.append(DeltaChoice(**self._fields(delta), delta=message, logprobs=self._chat_logprobs(delta)))
        chunk = ChatChunk(**self._common, choices=choices, usage=usage).model_dump_json()
        self._common.pop("prompt_token_ids", None)  # only the first chunk has them
        return chunk

    def _chat_logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        pairs = zip(*self._logprobs(delta), strict=True)
        return ChatLogprobs(content=[TokenLogprob(token=token, logprob=logprob) for token, logprob in pairs])


def finite_or_none(logprobs: Float32Array) -> list[float | None]:
    """Replace NaN and infinities, which JSON lacks, by None; JSON keeps every other float32 exactly."""
    return [value if math.isfinite(value) else None for value in logprobs.tolist()]


def merge_deltas(first: Delta, second: Delta) -> Delta:
    """Merge two consecutive deltas of one choice."""
    generated = GeneratedTokens.joined([first.generated, second.generated])
    return replace(second, text=first.text + second.text, generated=generated)


def usage_of(prompts: Sequence[Sequence[int]], num_tokens: int) -> Usage:
    """Count the tokens of the prompts and of the response; `num_tokens`: generated tokens."""
    num_prompt = sum(map(len, prompts))
    return Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens, total_tokens=num_prompt + num_tokens)
