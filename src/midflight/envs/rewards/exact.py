"""Equality of the response and the right answer as text."""

from __future__ import annotations

from midflight.types import Grade, Problem


def exact(problem: Problem, response: str, *, ignore_case: bool = False, last_line: bool = False) -> Grade:
    """Return 1 if the response equals the answer, else 0; leading, trailing and repeated white space does not count.

    With `last_line`, only the last line of the response that is not empty counts.
    """
    lines = response.strip().splitlines()
    found = " ".join((lines[-1] if lines and last_line else response).split())
    expected = " ".join(problem.answer.split())
    if ignore_case:
        found, expected = found.casefold(), expected.casefold()
    return Grade(float(found == expected), answer=found)
