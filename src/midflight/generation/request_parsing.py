"""From a request body to GenerationRequests: the prompt's tokens, limits, defaults, rollout ids."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from midflight.generation.http_errors import ApiError
from midflight.generation.schemas import (
    NUM_ROLLOUT_IDS,
    ChatMessage,
    CompletionRequest,
    Generated,
    GenerationOptions,
    tokens_of,
)
from midflight.models.text import decode, encode_chat, encode_prompt
from midflight.protocols import Tokenizer
from midflight.types import GeneratedTokens, GenerationRequest, Int32Array, RolloutId, SamplingParams


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served: the limits that requests are held to, and the tokenizer."""

    name: str
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]  # of a request that names none
    vocab_size: int
    max_length: int  # of prompt and response
    max_tokens: int  # per response
    max_samples: int  # per request


class Tokenizing:
    """The tokenizer, off the event loop where a text can be long; one at a time, since it is not made for two."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._token_texts: dict[int, str] = {}

    async def encode(self, text: str) -> list[int]:
        """Raises: ApiError 400 for half a surrogate pair, which JSON can say and no tokenizer understands."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(400, f"prompt: character {error.start} is half a surrogate pair", param="prompt") from error
        return await asyncio.get_running_loop().run_in_executor(self._executor, encode_prompt, self._tokenizer, text)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Raises: ApiError 400 if there is no chat template, or it does not take these messages."""
        if not self._tokenizer.chat_template:
            raise ApiError(400, "the model's tokenizer has no chat template; /v1/completions would work")
        plain = [_plain(message) for message in messages]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, encode_chat, self._tokenizer, plain)
        except Exception as error:  # whatever a template likes to raise
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)

    def of_token(self, token_id: int) -> str:
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self._tokenizer.decode([token_id])
        return self._token_texts[token_id]


def generation_requests(
    model: ServedModel,
    body: GenerationOptions,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    *,
    score_prompts: bool = False,
) -> list[GenerationRequest]:
    """One for each choice: the samples of the first prompt, then those of the second.

    Raises: ApiError naming the field and the number that does not fit.
    """
    num_samples = body.n or 1
    num_choices = num_samples * len(prompts)
    if body.model not in (None, model.name):
        raise ApiError(
            404, f"there is no model {body.model!r}, only {model.name!r}", param="model", code="model_not_found"
        )
    if num_samples > model.max_samples:
        raise ApiError(400, f"n is {num_samples}, not 1 to {model.max_samples}", param="n")
    if num_choices > model.max_samples:
        raise ApiError(
            400,
            f"prompt: {len(prompts)} prompts times n are {num_choices}, not 1 to {model.max_samples}",
            param="prompt",
        )
    if body.generated and num_choices > 1:
        name, number = ("n", num_samples) if num_samples > 1 else ("prompt", len(prompts))
        raise ApiError(400, f"{name} is {number}, but only one sample can go on after `generated`", param=name)
    if body.rollout_id is not None and body.rollout_id + num_choices > NUM_ROLLOUT_IDS:
        raise ApiError(400, f"rollout_id + n is above {NUM_ROLLOUT_IDS}", param="rollout_id")
    stop_token_ids = model.stop_token_ids if body.stop_token_ids is None else tuple(body.stop_token_ids)
    generated = _generated_tokens(body.generated) if body.generated else None
    _check_token_ids("stop_token_ids", stop_token_ids, model.vocab_size)
    for prompt in prompts:
        _check_token_ids("prompt", prompt, model.vocab_size)
    if generated:
        _check_token_ids("generated.token_ids", generated.token_ids.tolist(), model.vocab_size)
    sampling = SamplingParams(
        max_tokens=model.max_tokens if max_tokens is None else max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        stop_token_ids=stop_token_ids,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
    )
    seed = secrets.randbits(63) if body.seed is None else body.seed
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    first = _own_rollout_id(seed, arrays) if body.rollout_id is None else RolloutId(body.rollout_id)
    return [
        GenerationRequest(
            RolloutId(first + index), prompt, sampling, seed, generated, score_prompts, body.first_position
        )
        for index, prompt in enumerate(prompt for prompt in arrays for _ in range(num_samples))
    ]


def check_echo(body: CompletionRequest) -> None:
    """Raises: ApiError if the request asks for a scored prompt and for something that does not go with it."""
    if not body.echo:
        if body.max_tokens == 0:
            raise ApiError(400, "max_tokens: 0 needs echo = true, which scores the prompt", param="max_tokens")
        return
    refused = {
        "stream": "its answer comes whole",
        "stop": "stop_token_ids would work",
        "generated": "all of a sequence can be the prompt",
        "top_k": "prompts are scored by the whole distribution",
        "top_p": "prompts are scored by the whole distribution",
        "min_p": "prompts are scored by the whole distribution",
    }
    for name, instead in refused.items():
        value = getattr(body, name)
        if value and not (name == "top_p" and value == 1):
            raise ApiError(400, f"{name}: not with echo; {instead}", param=name)


def _check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    worst = max(token_ids, default=0)
    if worst >= vocab_size:
        raise ApiError(400, f"{field}: token id {worst} is not in 0 to {vocab_size - 1}", param=field)


def _own_rollout_id(seed: int, prompts: Sequence[Int32Array]) -> RolloutId:
    """The same for the same seed and prompts, so that a seed alone makes a request repeatable."""
    tokens = b"".join(prompt.tobytes() for prompt in prompts)
    digest = hashlib.blake2b(seed.to_bytes(9, "little", signed=True) + tokens, digest_size=6).digest()
    return RolloutId(NUM_ROLLOUT_IDS + int.from_bytes(digest, "little"))


def _generated_tokens(generated: Generated) -> GeneratedTokens | None:
    num_tokens = len(generated.token_ids)
    for name in ("logprobs", "weight_versions"):
        length = len(getattr(generated, name))
        if length != num_tokens:
            raise ApiError(400, f"generated: {num_tokens} token_ids but {length} {name}", param=f"generated.{name}")
    if not num_tokens:
        return None
    return tokens_of(generated.token_ids, generated.logprobs, generated.weight_versions)


def _plain(message: ChatMessage) -> dict[str, str]:
    """As most templates want it: the parts of the content in one text."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": message.role, "content": text, **({"name": message.name} if message.name else {})}
