"""Stop strings as a rule over token ids, against a search in the text of all tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from chat_tokenizers import CHATML, chat_tokenizer
from midflight.models.prompts import PromptFormat
from midflight.models.stopping import StringStopRule, split_stops
from midflight.types import FinishReason, GeneratedTokens, Int32Array


def byte_level() -> Any:
    return chat_tokenizer(CHATML)


def byte_fallback() -> Any:
    """Tokenizer as SentencePiece makes them: spaces belong to words, and unknown characters become bytes."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"ab!",
        "\u2581",
        "\u2581a",
        "\u2581END",
        "END",
        "ab",
    ]
    core = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}
STOPS = [("END",), ("\n\n",), ("ab\n", "!"), ("\N{SNOWMAN}b",), (" a",), ("a END",)]


def as_array(token_ids: list[int]) -> Int32Array:
    return np.array(token_ids, np.int32)


def first_end_in_text(tokenizer: Any, token_ids: list[int], strings: tuple[str, ...]) -> int | None:
    texts = (tokenizer.decode(token_ids[: end + 1], skip_special_tokens=True) for end in range(len(token_ids)))
    return next((end for end, text in enumerate(texts) if any(string in text for string in strings)), None)


def likely_pieces(tokenizer: Any) -> list[list[int]]:
    """Tokens and short rows of tokens whose texts take part in the stop strings, and a few others."""
    texts = [
        "END",
        "E",
        "N",
        "D",
        "ab",
        "b",
        " a",
        " END",
        "!",
        "\n",
        "\n\n",
        "ab\n",
        "!\n",
        "\N{SNOWMAN}",
        "x",
        "<|im_end|>",
    ]
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    known = tokenizer.get_vocab()
    return [*rows, *([known[piece]] for piece in ("\u2581END", "\u2581a", "END") if piece in known)]


@pytest.mark.parametrize("strings", STOPS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_rule_finds_the_token_that_completes_a_string(name: str, strings: tuple[str, ...]) -> None:
    tokenizer = TOKENIZERS[name]()
    rule, random = StringStopRule(tokenizer, strings), np.random.default_rng(0)
    pieces, ends = likely_pieces(tokenizer), []
    for _ in range(60):
        token_ids = [token for piece in random.integers(len(pieces), size=30) for token in pieces[piece]]
        ends.append(rule.first_end(as_array(token_ids)))
        assert ends[-1] == first_end_in_text(tokenizer, token_ids, strings)
    assert any(end is not None for end in ends), "the test must find something"


def test_few_tokens_may_complete_a_string() -> None:
    tokenizer = byte_level()
    rule = StringStopRule(tokenizer, ["END"])
    candidates = {token for token in range(len(tokenizer)) if rule.may_end(token)}
    complete = {
        text: tokenizer.convert_tokens_to_ids(text) in candidates for text in ("D", "END", "EN", "E", "a", "</s>")
    }
    assert complete == {"D": True, "END": True, "EN": False, "E": False, "a": False, "</s>": False}


def test_only_candidates_are_decoded_again() -> None:
    class Counting:
        num_decoded = 0

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            self.num_decoded += 1
            return "".join("abcd"[token] for token in token_ids)

    tokenizer: Any = Counting()
    rule = StringStopRule(tokenizer, ["abcd"])
    assert rule.first_end(as_array([0, 1, 2] * 100)) is None
    assert tokenizer.num_decoded == 6, "two for each token of the vocabulary that occurs"
    assert rule.first_end(as_array([0, 1, 2] * 100 + [3])) == 300


def generated(tokenizer: Any, text: str, *more: int) -> GeneratedTokens:
    ids = as_array([*tokenizer.encode(text, add_special_tokens=False), *more])
    return GeneratedTokens(ids, np.zeros(len(ids), np.float32), np.zeros_like(ids))


def test_text_ends_before_the_stop_string() -> None:
    tokenizer = byte_level()
    prompts, end = PromptFormat(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    stopped = generated(tokenizer, "a b EN", tokenizer.convert_tokens_to_ids("D"))
    assert prompts.response_text(stopped, FinishReason.STOP, ("END",)) == "a b "
    # A response that ended with an end token loses this token only, although stop strings are set.
    assert prompts.response_text(generated(tokenizer, "a b", end), FinishReason.STOP, ("END",)) == "a b"
    assert prompts.response_text(generated(tokenizer, "a b!"), FinishReason.LENGTH, ("END",)) == "a b!"


def test_rest_of_the_last_token_is_left_out_of_the_text() -> None:
    tokenizer = byte_level()
    stopped = generated(tokenizer, "ab\n")
    assert len(stopped) == 1
    assert PromptFormat(tokenizer).response_text(stopped, FinishReason.STOP, ("b",)) == "a"


def test_special_tokens_become_stop_tokens() -> None:
    tokenizer = byte_level()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert split_stops(tokenizer, ("<|im_end|>", "END", "!")) == ([end], ("END", "!"))
