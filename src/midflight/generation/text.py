"""Incremental detokenization: only whole characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Converts a growing sequence of tokens to pieces of text that add up to the text of all tokens.

    The text of a token can depend on the token before, and a character can take several tokens. Therefore the tokens
    since the last whole character are decoded together with the tokens of the piece before; the additional text is new.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []  # the tokens of the piece before, then the new tokens
        self._num_before = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the new text; an incomplete character at the end is held back."""
        self._token_ids += token_ids
        new = self._new_text()
        if new.endswith(_INCOMPLETE):
            return ""
        self._token_ids = self._token_ids[self._num_before :]
        self._num_before = len(self._token_ids)
        return new

    def flush(self) -> str:
        """Return the text held back at the end of the sequence."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._decode(self._token_ids[: self._num_before])
        return self._decode(self._token_ids)[len(before) :]


class StopStrings:
    """Passes text on up to the first stop string; holds back text that could be the beginning of a stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that can be passed on, and True if a stop string follows it."""
        text = self._held + text
        starts = [at for string in self._strings if (at := text.find(string)) >= 0]
        if starts:
            self._held = ""
            return text[: min(starts)], True
        num_held = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """Return the text held back at the end of the sequence."""
        return self._held


def _overlap(text: str, string: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the string."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)
