"""From a request body to GenerationRequests: the prompt's tokens, limits, defaults, rollout ids."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from midflight.generation.chat import ChatEncoder
from midflight.generation.http_errors import ApiError
from midflight.generation.prompt_limits import PromptLimit
from midflight.generation.request_schemas import ChatRequest, CompletionRequest, GenerationOptions
from midflight.generation.schemas import NUM_ROLLOUT_IDS, Generated, tokens_of
from midflight.models.stopping import StopRules
from midflight.models.text import decode, encode_text
from midflight.models.tokenizer import Tokenizer
from midflight.types import GeneratedTokens, GenerationRequest, Int32Array, RolloutId, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a server: its tokenizer and the limits of requests."""

    name: str
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]  # default of a request
    vocab_size: int
    max_length: int  # tokens of prompt and response together
    max_tokens: int  # tokens of a response
    max_samples: int  # choices of a request


class AsyncTokenizer:
    """A tokenizer that encodes in a thread of its own, so that long texts do not block the event loop.

    One thread, because tokenizers are not thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        """`max_length`: limit on prompt and response together (tokens)."""
        self._tokenizer, self._chat = tokenizer, ChatEncoder(tokenizer)
        self._limit = PromptLimit(tokenizer, max_length)
        self.stop_rules = StopRules(tokenizer)  # for the event loop
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._token_texts: dict[int, str] = {}

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode prompts.

        Raises: ApiError 400 for a text that cannot fit into the context, and for an unpaired surrogate, which JSON can
        contain but tokenizers cannot encode.
        """
        try:
            for text in texts:
                self._limit.check("prompt", len(text))
                text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(400, f"prompt: character {error.start} is an unpaired surrogate", param="prompt") from error
        return await self._in_thread(lambda: [encode_text(self._tokenizer, text) for text in texts])

    async def encode_chat(self, body: ChatRequest) -> list[int]:
        """Render a conversation with the chat template and encode it.

        Raises: ApiError 400 if it cannot fit into the context, or as `ChatEncoder.encode`.
        """
        self._limit.check_chat(body)
        return await self._in_thread(lambda: self._chat.encode(body))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text."""
        return decode(self._tokenizer, token_ids)

    def token_text(self, token_id: int) -> str:
        """Decode one token; cached."""
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
    """Create one request for each choice: `n` samples of the first prompt, then `n` samples of the second, and so on.

    Raises: ApiError naming the field and the value that does not fit.
    """
    num_samples = body.n or 1
    num_choices = num_samples * len(prompts)
    check_model_name(model, body.model)
    check_num_choices(model, num_samples, len(prompts))
    if body.generated and num_choices > 1:
        name, number = ("n", num_samples) if num_samples > 1 else ("prompt", len(prompts))
        raise ApiError(400, f"{name} is {number}, but only one sample can continue after `generated`", param=name)
    if body.rollout_id is not None and body.rollout_id + num_choices > NUM_ROLLOUT_IDS:
        raise ApiError(400, f"rollout_id + n is above {NUM_ROLLOUT_IDS}", param="rollout_id")
    stop_token_ids = model.stop_token_ids if body.stop_token_ids is None else tuple(body.stop_token_ids)
    generated = _generated_tokens(body.generated) if body.generated else None
    _check_token_ids("stop_token_ids", stop_token_ids, model.vocab_size)
    for prompt in prompts:
        _check_token_ids("prompt", prompt, model.vocab_size)
    if generated:
        _check_token_ids("generated.token_ids", generated.token_ids.tolist(), model.vocab_size)
    samplings = [_sampling(body, stop_token_ids, _max_tokens(model, len(prompt), max_tokens)) for prompt in prompts]
    seed = secrets.randbits(63) if body.seed is None else body.seed
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    first = _derived_rollout_id(seed, arrays) if body.rollout_id is None else RolloutId(body.rollout_id)
    return [
        GenerationRequest(
            RolloutId(first + index),
            arrays[index // num_samples],
            samplings[index // num_samples],
            seed,
            generated,
            score_prompts,
            body.first_position,
        )
        for index in range(num_choices)
    ]


def _sampling(body: GenerationOptions, stop_token_ids: tuple[int, ...], max_tokens: int) -> SamplingParams:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stop):
        raise ApiError(400, "stop: an empty string would end every response at once", param="stop")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        stop_token_ids=stop_token_ids,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        stop=tuple(stop),
    )


def _max_tokens(model: ServedModel, num_prompt_tokens: int, max_tokens: int | None) -> int:
    """Return the largest length of a response, by default the room after its prompt.

    The engine refuses prompts that leave no room. Raises: ApiError if `max_tokens` is larger than the room.
    """
    room = max(1, min(model.max_tokens, model.max_length - num_prompt_tokens))
    if max_tokens is None:
        return room
    if max_tokens > room and num_prompt_tokens < model.max_length:
        after = f"after a prompt of {num_prompt_tokens} tokens"
        raise ApiError(400, f"max_tokens is {max_tokens}, not 1 to {room} {after}", param="max_tokens")
    return max_tokens


def check_num_choices(model: ServedModel, num_samples: int, num_prompts: int) -> None:
    """Check the number of choices of a request. Raises: ApiError 400."""
    if num_samples > model.max_samples:
        raise ApiError(400, f"n is {num_samples}, not 1 to {model.max_samples}", param="n")
    num_choices = num_samples * num_prompts
    if num_choices > model.max_samples:
        raise ApiError(
            400,
            f"prompt: {num_prompts} prompts times n are {num_choices}, not 1 to {model.max_samples}",
            param="prompt",
        )


def check_model_name(model: ServedModel, name: str | None) -> None:
    """Check that a request is for the served model. Raises: ApiError 404."""
    if name not in (None, model.name):
        raise ApiError(404, f"there is no model {name!r}, only {model.name!r}", param="model", code="model_not_found")


def check_echo(body: CompletionRequest) -> None:
    """Check the options of a request that scores its prompt.

    Raises: ApiError if an option cannot be combined with `echo`, or needs `echo` and lacks it.
    """
    if not body.echo:
        if body.max_tokens == 0:
            raise ApiError(400, "max_tokens: 0 needs echo = true, which scores the prompt", param="max_tokens")
        return
    refused = {
        "stream": "its answer comes whole",
        "stop": "use stop_token_ids",
        "generated": "put all tokens of the sequence into the prompt",
        "top_k": "prompts are scored by the whole distribution",
        "top_p": "prompts are scored by the whole distribution",
        "min_p": "prompts are scored by the whole distribution",
    }
    for name, advice in refused.items():
        value = getattr(body, name)
        if value and not (name == "top_p" and value == 1):
            raise ApiError(400, f"{name}: not with echo; {advice}", param=name)


def _check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise ApiError(400, f"{field}: token id {largest} is not in 0 to {vocab_size - 1}", param=field)


def _derived_rollout_id(seed: int, prompts: Sequence[Int32Array]) -> RolloutId:
    """Derive an id from the seed and the prompts, so that a request with a seed is repeatable without a rollout id."""
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
