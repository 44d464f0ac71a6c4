"""Answers found by regular expressions, for the options of several rewards."""

from __future__ import annotations

import re

from midflight.errors import RecipeError


def compiled(reward: str, pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Return the compiled option `pattern` of a reward. Raises: RecipeError."""
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise RecipeError(f"task.rewards: {reward}: pattern = {pattern!r} is no regular expression: {error}") from error


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of the last match, or the whole match if there is no group; None without a match."""
    found = None
    for match in pattern.finditer(text):
        found = match
    return found and found[1 if pattern.groups else 0]
