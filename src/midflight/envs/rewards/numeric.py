"""Equality of the last number in a response and the right number, within a tolerance."""

from __future__ import annotations

import re

from midflight.envs.patterns import compiled, last_answer
from midflight.errors import RecipeError
from midflight.types import Grade, Problem

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
# A minus sign belongs to a number unless a digit or letter precedes it: "7-5" has the numbers 7 and 5.
_NUMBER = re.compile(rf"(?:(?<![\w.)])[-+\u2212])?{_DIGITS}(?:[eE][-+]?\d+|/{_DIGITS})?")


class Numeric:
    """Reward 1 if the last number in the response is near `problem.answer`, else 0.

    Near means |number - answer| <= max(absolute, relative * |answer|). Commas between groups of three digits are left
    out, and 3/4 is one number. With `pattern`, the number is searched in its first group at its last match, such as
    `#### (.*)`. A right answer without a number is an error.
    """

    def __init__(self, *, absolute: float = 1e-9, relative: float = 1e-6, pattern: str | None = None) -> None:
        if absolute < 0 or relative < 0:
            raise RecipeError(
                f"task.rewards: numeric: absolute = {absolute:g} and relative = {relative:g} must not be negative"
            )
        self._absolute, self._relative = absolute, relative
        self._pattern = None if pattern is None else compiled("task.rewards: numeric: pattern", pattern)

    def __call__(self, problem: Problem, response: str) -> Grade:
        expected = _last_number(problem.answer)
        if expected is None:
            raise ValueError(f"the right answer {problem.answer!r} has no number")
        text = response if self._pattern is None else last_answer(self._pattern, response)
        found = None if text is None else _last_number(text)
        if found is None:
            return Grade(0.0)
        tolerance = max(self._absolute, self._relative * abs(expected))
        return Grade(float(abs(found - expected) <= tolerance), answer=f"{found:.12g}")


def _last_number(text: str) -> float | None:
    found = last_answer(_NUMBER, text)
    if found is None:
        return None
    number, _, divisor = found.replace(",", "").replace("\u2212", "-").partition("/")
    return float(number) / float(divisor or 1) if float(divisor or 1) else None
