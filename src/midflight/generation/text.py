"""Tokens to text while they come: whole characters only, and an end before a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of a growing sequence of tokens. The pieces add up to the text of all tokens.

    A token's text can depend on the one before it, and a character can take several tokens. So the tokens since the
    last whole character are decoded after those of the piece before, and what that adds is new.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []  # of the piece before, then the new ones
        self._num_before = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text these tokens complete; an unfinished character at the end is kept back."""
        self._token_ids += token_ids
        new = self._new_text()
        if new.endswith(_INCOMPLETE):
            return ""
        self._token_ids = self._token_ids[self._num_before :]
        self._num_before = len(self._token_ids)
        return new

    def flush(self) -> str:
        """What was kept back."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._decode(self._token_ids[: self._num_before])
        return self._decode(self._token_ids)[len(before) :]


class StopStrings:
    """Passes text on up to the first stop string, and keeps back what could be the beginning of one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is certain, and whether a stop string came after it."""
        text = self._held + text
        found = [at for string in self._strings if (at := text.find(string)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        num_held = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        return self._held


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of the text that the string begins with."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)
