"""Equality of the answer in a response and the right answer as text."""

from __future__ import annotations

from midflight.envs.patterns import compiled, last_answer
from midflight.types import Grade, Problem


class Exact:
    """Reward 1 if the response equals `problem.answer`, else 0.

    White space at the ends does not count, and inner white space counts as one space. With `pattern`, only its first
    group at its last match in the response is compared, such as `Answer: (.*)`.
    """

    def __init__(self, *, pattern: str | None = None, ignore_case: bool = False) -> None:
        self._pattern = None if pattern is None else compiled("task.rewards: exact: pattern", pattern)
        self._ignore_case = ignore_case

    def __call__(self, problem: Problem, response: str) -> Grade:
        found = response if self._pattern is None else last_answer(self._pattern, response)
        if found is None:
            return Grade(0.0)
        answer = self._normalized(found)
        return Grade(float(answer == self._normalized(problem.answer)), answer=answer)

    def _normalized(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self._ignore_case else text
