"""Stop strings as a rule over token ids: a response ends with the token that completes a stop string.

The token is part of the response: it was sampled and carries loss. The text of the response ends before the string.
"""

from __future__ import annotations

from collections.abc import Sequence

from midflight.models.text import decode, is_special
from midflight.models.tokenizer import Tokenizer
from midflight.types import Int32Array

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_RULES = 64  # kept at a time; clients of a server may send any stop strings
_MARGIN = 16  # tokens of a window beyond twice the bytes of a stop string: special tokens and parts of characters


class StringStopRule:
    """Implements StopRule for stop strings.

    Few tokens can complete a stop string. All other tokens cost one look-up, without decoding. The rule depends on the
    response's tokens only, so a resumed response ends with the same token as an uninterrupted one.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._window = 2 * max(len(string.encode()) for string in strings) + _MARGIN
        self._may_end: dict[int, bool] = {}

    def may_end(self, token_id: int) -> bool:
        known = self._may_end.get(token_id)
        if known is None:
            # Some decoders strip white space from the first token, so decode the token at two places.
            alone = decode(self._tokenizer, [token_id])
            inside = decode(self._tokenizer, [token_id, token_id])[len(alone) :]
            texts = (alone, inside)
            known = any(_INCOMPLETE in text or _may_complete(text, s) for text in texts for s in self._strings)
            self._may_end[token_id] = known
        return known

    def ends(self, token_ids: Int32Array) -> bool:
        text = decode(self._tokenizer, token_ids[-self._window :].tolist())
        return any(string in text for string in self._strings)

    def first_end(self, token_ids: Int32Array, start: int = 0) -> int | None:
        """Position of the first token from `start` on that completes a stop string, or None."""
        for position in range(start, len(token_ids)):
            if self.may_end(int(token_ids[position])) and self.ends(token_ids[: position + 1]):
                return position
        return None

    def cut(self, text: str) -> str:
        """Text before the first stop string."""
        starts = [at for string in self._strings if (at := text.find(string)) >= 0]
        return text[: min(starts)] if starts else text


def _may_complete(text: str, string: str) -> bool:
    """True if a token with this text can complete the string: it holds the string, or begins with its end."""
    return string in text or any(text.startswith(string[start:]) for start in range(1, len(string)))


def split_stops(tokenizer: Tokenizer, strings: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """Split stop strings into special tokens, which the text of a response never shows, and all other strings."""
    token_ids, others = [], []
    for string in strings:
        encoded = tokenizer.encode(string, add_special_tokens=False)
        if len(encoded) == 1 and is_special(tokenizer, encoded[0]):
            token_ids.append(encoded[0])
        else:
            others.append(string)
    return token_ids, tuple(others)


class StopRules:
    """The rules of one tokenizer, by their stop strings. Not thread-safe: a rule keeps what it has decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: dict[tuple[str, ...], StringStopRule] = {}

    def __call__(self, strings: tuple[str, ...]) -> StringStopRule:
        rule = self._rules.get(strings)
        if rule is None:
            if len(self._rules) >= _MAX_RULES:
                self._rules.clear()
            rule = self._rules[strings] = StringStopRule(self._tokenizer, strings)
        return rule
