"""Tokenizers of published families: prompts, end tokens, special tokens inside a response, incomplete characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from midflight.errors import ModelError
from midflight.generation.text import Detokenizer
from midflight.models.loading import load_tokenizer, stop_token_ids
from midflight.models.prompts import PromptFormat
from midflight.models.smollm2 import smollm2_directory
from midflight.models.text import decode, encode_chat, encode_text, response_text
from midflight.types import FinishReason, GeneratedTokens
from published_models import PUBLISHED, VOCAB_SIZE, write_tokenizer

QUESTION = [{"role": "user", "content": "Where is 7 + 12?"}]
TOKENIZERS = ("qwen3", "llama3.2", "gemma2", "smollm2", "mistral-0.3")
ANSWER_BEGINS = {
    "qwen3": "<|im_start|>assistant\n",
    "llama3.2": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma2": "<start_of_turn>model\n",
    "smollm2": "<|im_start|>assistant\n",
    "mistral-0.3": "[/INST]",
}
TokenizerOf = Callable[[str], Any]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> TokenizerOf:
    loaded: dict[str, Any] = {}

    def tokenizer(name: str) -> Any:
        if name not in loaded:
            directory = tmp_path_factory.mktemp(name)
            write_tokenizer(name, directory)
            loaded[name] = load_tokenizer(directory)
        return loaded[name]

    return tokenizer


def generated(token_ids: list[int]) -> GeneratedTokens:
    zeros = np.zeros(len(token_ids), np.float32)
    return GeneratedTokens(np.array(token_ids, np.int32), zeros, zeros.astype(np.int32))


def plain(tokenizer: Any, text: str) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def broken(tokenizer: Any) -> list[int]:
    """Tokens of 東 without its last byte."""
    token_ids = plain(tokenizer, "東")
    assert len(token_ids) > 1, "the character is one token"
    return token_ids[:-1]


def streamed(tokenizer: Any, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(lambda ids: decode(tokenizer, ids))
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_chat_prompt_is_the_published_text_as_tokens(name: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(name)
    token_ids = encode_chat(tokenizer, QUESTION)
    text = tokenizer.decode(token_ids)
    assert text == tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert text.endswith(ANSWER_BEGINS[name])
    assert encode_text(tokenizer, text) == token_ids
    if PUBLISHED[name].adds_bos:
        assert [token_ids[0], token_ids.count(tokenizer.bos_token_id)] == [tokenizer.bos_token_id, 1]
    written = [token for token in PUBLISHED[name].special_tokens if token in text]
    assert written
    for token in written:
        assert token_ids.count(tokenizer.convert_tokens_to_ids(token)) == text.count(token)


def test_template_that_refuses_a_system_message_says_so(tokenizer_of: TokenizerOf) -> None:
    with pytest.raises(Exception, match="System role not supported"):
        encode_chat(tokenizer_of("gemma2"), [{"role": "system", "content": "Be brief."}, *QUESTION])


def test_thinking_is_turned_off_by_a_template_argument(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("qwen3")
    with_thinking = encode_chat(tokenizer, QUESTION)
    without = encode_chat(tokenizer, QUESTION, template_arguments={"enable_thinking": False})
    assert tokenizer.decode(without[len(with_thinking) :]) == "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_inside_a_response_are_not_graded(name: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(name)
    for token in PUBLISHED[name].special_tokens:
        special = tokenizer.convert_tokens_to_ids(token)
        token_ids = [*plain(tokenizer, "It is"), special, *plain(tokenizer, " 19.")]
        assert response_text(tokenizer, generated(token_ids), FinishReason.LENGTH) == "It is 19."
        assert "".join(streamed(tokenizer, token_ids)) == "It is 19."


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_end_token_is_graded(name: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(name)
    for token in PUBLISHED[name].stop_tokens:
        token_ids = [*plain(tokenizer, "It is 19."), tokenizer.convert_tokens_to_ids(token)]
        assert response_text(tokenizer, generated(token_ids), FinishReason.STOP) == "It is 19."


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_beyond_the_tokenizer_have_no_text(name: str, tokenizer_of: TokenizerOf) -> None:
    """Published vocabularies are padded to a round number; a policy can sample the padding."""
    tokenizer = tokenizer_of(name)
    assert len(tokenizer) < VOCAB_SIZE
    token_ids = [*plain(tokenizer, "It is"), VOCAB_SIZE - 1, *plain(tokenizer, " 19.")]
    assert response_text(tokenizer, generated(token_ids), FinishReason.LENGTH) == "It is 19."
    assert "".join(streamed(tokenizer, token_ids)) == "It is 19."
    assert tokenizer.decode([VOCAB_SIZE - 1]) == ""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_incomplete_character_is_marked_and_the_rest_is_kept(name: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(name)
    before, after = plain(tokenizer, "It is"), plain(tokenizer, " 19.")
    for token_ids, ending in (([*before, *broken(tokenizer), *after], " 19."), ([*before, *broken(tokenizer)], "")):
        text = response_text(tokenizer, generated(token_ids), FinishReason.LENGTH)
        assert text.startswith("It is")
        assert text.endswith(ending)
        assert set(text.removeprefix("It is").removesuffix(ending)) == {"\N{REPLACEMENT CHARACTER}"}
        assert "".join(streamed(tokenizer, token_ids)) == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_streamed_characters_are_never_halved(name: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(name)
    text = "Grüße aus 東京 🙂🙂, it is 19."
    token_ids = plain(tokenizer, text)
    pieces = streamed(tokenizer, token_ids)
    assert "".join(pieces) == text
    assert len(token_ids) > len([piece for piece in pieces if piece]) > 5
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if not PUBLISHED[name].byte_fallback])
def test_streamed_random_tokens_add_up_to_their_text(name: str, tokenizer_of: TokenizerOf) -> None:
    """Byte fallback is left out: a broken byte makes it mark the whole character before, which has been sent."""
    tokenizer = tokenizer_of(name)
    rng = np.random.default_rng(0)
    for _ in range(50):
        token_ids = rng.integers(0, VOCAB_SIZE, 40).tolist()
        assert "".join(streamed(tokenizer, token_ids)) == decode(tokenizer, token_ids)


@pytest.mark.slow
def test_smollm2_itself_renders_stops_and_streams() -> None:
    try:
        directory = smollm2_directory()
    except ModelError as error:
        pytest.skip(str(error))
    tokenizer: Any = load_tokenizer(directory)
    assert tokenizer.decode(encode_chat(tokenizer, QUESTION)).endswith(
        "<|im_start|>user\nWhere is 7 + 12?<|im_end|>\n<|im_start|>assistant\n"
    )
    token_ids = plain(tokenizer, "Grüße aus 東京 🙂 <|im_start|>and 19.")
    assert response_text(tokenizer, generated(token_ids), FinishReason.LENGTH) == "Grüße aus 東京 🙂 and 19."
    assert "".join(streamed(tokenizer, token_ids)) == "Grüße aus 東京 🙂 and 19."
    ends = stop_token_ids(directory, PromptFormat(tokenizer))
    assert tokenizer.convert_ids_to_tokens(list(ends)) == ["<|im_end|>"]
    text = response_text(tokenizer, generated([*plain(tokenizer, "It is"), *broken(tokenizer)]), FinishReason.LENGTH)
    assert text == "It is\N{REPLACEMENT CHARACTER}"
