"""Incremental detokenization and stop strings: the pieces add up to the text decoded at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.generation.text import Detokenizer, StopStrings


def decode_bytes(token_ids: Sequence[int]) -> str:
    """Decode tokens that are bytes; 256 is a special token without text."""
    return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")


def in_pieces(token_ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode_bytes)
    pieces, start = [], 0
    for size in [*sizes, len(token_ids)]:
        pieces.append(detokenizer.push(token_ids[start : start + size]))
        start += size
    return [*pieces, detokenizer.flush()]


def test_character_of_several_tokens_is_one_piece() -> None:
    text = "né 🙂!"
    pieces = in_pieces(list(text.encode()), [1] * len(text.encode()))
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


@given(st.lists(st.integers(0, 256), max_size=40), st.lists(st.integers(0, 4), max_size=30))
def test_pieces_add_up_for_any_bytes(token_ids: list[int], sizes: list[int]) -> None:
    assert "".join(in_pieces(token_ids, sizes)) == decode_bytes(token_ids)


@given(st.text(max_size=20), st.lists(st.integers(1, 3), max_size=60))
def test_pieces_of_valid_text_are_whole_characters(text: str, sizes: list[int]) -> None:
    pieces = in_pieces(list(text.encode()), sizes)
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece or "\N{REPLACEMENT CHARACTER}" in text for piece in pieces)


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_string_is_found_in_any_pieces(pieces: list[str], strings: list[str]) -> None:
    stop = StopStrings(strings)
    text, seen = "", ""
    for piece in pieces:
        seen += piece
        passed, found = stop.push(piece)
        text += passed
        first = min((at for string in strings if (at := seen.find(string)) >= 0), default=None)
        assert found == (first is not None)
        if first is not None:
            assert text == seen[:first]
            return
        assert not any(string in text for string in strings)
    assert text + stop.flush() == "".join(pieces)


@pytest.mark.parametrize(("text", "passed"), [("abc", "abc"), ("abS", "ab"), ("abSTO", "ab"), ("aSTOP", "a")])
def test_possible_start_of_a_stop_string_is_held_back(text: str, passed: str) -> None:
    assert StopStrings(["STOP"]).push(text) == (passed, text.endswith("STOP"))
