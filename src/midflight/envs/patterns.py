"""Answers found by regular expressions, for options of datasets, tasks and rewards."""

from __future__ import annotations

import re
from collections import deque

from midflight.errors import RecipeError


def compiled(key: str, pattern: str, flags: int = 0, *, group_holds: str | None = None) -> re.Pattern[str]:
    """Return the compiled pattern of the option `key`.

    `group_holds`: content of the first group, for patterns that need one.
    Raises: RecipeError.
    """
    try:
        expression = re.compile(pattern, flags)
    except re.error as error:
        raise RecipeError(f"{key} = {pattern!r} is not a regular expression: {error}") from error
    if group_holds and not expression.groups:
        raise RecipeError(f"{key} = {pattern!r} has no group; parentheses around {group_holds} would work")
    return expression


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match; None without a match."""
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def last_answer(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of the last match, or the whole match if there is no group; None without a match."""
    match = last_match(pattern, text)
    return match and match[1 if pattern.groups else 0]
