"""How parts of generated text become OpenAI responses, whole or in chunks."""

from __future__ import annotations

import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from midflight.generation.jobs import Part
from midflight.generation.request_parsing import Tokenizing
from midflight.generation.schemas import (
    AssistantMessage,
    ChatChunk,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    DeltaChoice,
    GenerationOptions,
    MessageChoice,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    Usage,
)
from midflight.types import Float32Array, GeneratedTokens


class Reply(ABC):
    """How parts become a response or chunks of one."""

    def __init__(self, model: str, body: GenerationOptions, prompts: Sequence[Sequence[int]], text: Tokenizing) -> None:
        self.body, self.prompts, self.text = body, prompts, text
        self._common: dict[str, Any] = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        if body.return_token_ids:
            self._common["prompt_token_ids"] = list(prompts[0] if len(prompts) == 1 else prompts)

    @abstractmethod
    def response(self, parts: Sequence[Part], usage: Usage | None) -> str: ...

    @abstractmethod
    def chunk(self, parts: Sequence[Part], usage: Usage | None = None) -> str:
        """Empty `parts` for the chunk that has the usage."""

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


class CompletionReply(Reply):
    body: CompletionRequest

    def response(self, parts: Sequence[Part], usage: Usage | None) -> str:
        choices = [
            TextChoice(**self._fields(part), text=part.text, logprobs=self._text_logprobs(part))
            for part in map(self._with_prompt, parts)
        ]
        return CompletionResponse(**self._common, choices=choices, usage=usage).model_dump_json()

    def chunk(self, parts: Sequence[Part], usage: Usage | None = None) -> str:
        chunk = self.response(parts, usage)
        self._common.pop("prompt_token_ids", None)  # once is enough
        return chunk

    def _with_prompt(self, part: Part) -> Part:
        """Unchanged if there is nothing to echo: the prompt of an aborted request may not have been scored."""
        if part.prompt is None:
            return part
        prompt = self.body.prompt
        text = prompt if isinstance(prompt, str) else self.text.decode(part.prompt.token_ids.tolist())
        return joined(replace(part, text=text, generated=part.prompt), part)

    def _text_logprobs(self, part: Part) -> TextLogprobs | None:
        if self.body.logprobs is None:
            return None
        tokens, logprobs = self._logprobs(part)
        return TextLogprobs(tokens=tokens, token_logprobs=logprobs)


class ChatReply(Reply):
    body: ChatRequest

    def __init__(self, model: str, body: ChatRequest, prompts: Sequence[Sequence[int]], text: Tokenizing) -> None:
        super().__init__(model, body, prompts, text)
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


def finite_or_none(logprobs: Float32Array) -> list[float | None]:
    """JSON has no infinities. A float32 survives the way through decimal digits exactly."""
    return [value if math.isfinite(value) else None for value in logprobs.tolist()]


def joined(first: Part, second: Part) -> Part:
    """Two parts of one choice as one."""
    generated = GeneratedTokens.joined([first.generated, second.generated])
    return replace(second, text=first.text + second.text, generated=generated)


def usage_of(prompts: Sequence[Sequence[int]], num_tokens: int) -> Usage:
    num_read = sum(map(len, prompts))
    return Usage(prompt_tokens=num_read, completion_tokens=num_tokens, total_tokens=num_read + num_tokens)
