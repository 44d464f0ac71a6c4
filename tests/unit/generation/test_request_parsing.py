"""Length of a response in a context that it shares with its prompt."""

from __future__ import annotations

import pytest

from midflight.generation.http_errors import ApiError
from midflight.generation.request_parsing import ServedModel, generation_requests
from midflight.generation.request_schemas import CompletionRequest
from midflight.testing.fakes import DigitTokenizer

MODEL = ServedModel("digits", DigitTokenizer(), (), vocab_size=10, max_length=12, max_tokens=9, max_samples=8)


def max_tokens_after(*prompt_lengths: int, max_tokens: int | None = None) -> list[int]:
    prompts = [[1] * length for length in prompt_lengths]
    requests = generation_requests(MODEL, CompletionRequest(prompt=prompts), prompts, max_tokens)
    return [request.sampling.max_tokens for request in requests]


def test_default_fills_the_context_up_to_the_limit() -> None:
    assert max_tokens_after(2, 3, 4, 11) == [9, 9, 8, 1]


def test_explicit_value_is_kept_if_it_fits() -> None:
    assert max_tokens_after(2, 4, max_tokens=8) == [8, 8]


@pytest.mark.parametrize(("prompt_length", "max_tokens", "room"), [(2, 10, 9), (5, 8, 7), (11, 2, 1)])
def test_value_above_the_room_is_refused(prompt_length: int, max_tokens: int, room: int) -> None:
    with pytest.raises(ApiError, match=f"max_tokens is {max_tokens}, not 1 to {room} after a prompt of") as raised:
        max_tokens_after(prompt_length, max_tokens=max_tokens)
    assert raised.value.detail.param == "max_tokens"


def test_prompt_without_room_is_left_to_the_engine() -> None:
    assert max_tokens_after(12) == [1]
    assert max_tokens_after(12, max_tokens=3) == [3]
