"""The letter that a response chooses."""

from __future__ import annotations

import functools
import re

from midflight.envs.patterns import last_answer
from midflight.errors import RecipeError
from midflight.types import Grade, Problem


class MultipleChoice:
    """Reward 1 if the response chooses the letter of `problem.answer`, else 0.

    The first of these that the response has counts, each at its last place: a boxed letter; a letter after "answer"
    and "is", ":" or "="; a letter in parentheses; a letter alone on a line or before ".", ":" or ")"; a capital letter
    that is a word, except A and I. The right answer may be written as "B", "(B)" or "B. text".
    """

    def __init__(self, *, letters: str = "ABCDEFGHIJ") -> None:
        if not letters.isalpha() or not letters.isupper():
            raise RecipeError(
                f"task.rewards: multiple_choice: letters = {letters!r}; capitals such as 'ABCD' would work"
            )
        self._patterns = _patterns(letters)
        self._right = re.compile(rf"\s*\(?([{letters}])(?!\w)", re.IGNORECASE)

    def __call__(self, problem: Problem, response: str) -> Grade:
        right = self._right.match(problem.answer)
        if right is None:
            raise ValueError(f"the right answer {problem.answer!r} does not begin with a letter of the choices")
        found = next((letter for pattern in self._patterns if (letter := last_answer(pattern, response))), None)
        if found is None:
            return Grade(0.0)
        return Grade(float(found.upper() == right[1].upper()), answer=found.upper())


@functools.cache
def _patterns(letters: str) -> tuple[re.Pattern[str], ...]:
    letter = f"([{letters}])"
    words = f"([{re.sub('[AI]', '', letters)}])" if re.sub("[AI]", "", letters) else letter
    return (
        re.compile(rf"\\boxed\{{\s*(?:\\text\w*\{{)?\(?{letter}\)?\b", re.IGNORECASE),
        re.compile(rf"(?i:\banswer\b[^.\n]{{0,40}}?(?:\bis\b|:|=))[\s*_(]*{letter}(?![\w'])"),
        re.compile(rf"\({letter}\)"),
        re.compile(rf"^[\s*_]*{letter}(?:[\s*_]*$|[.:)])", re.MULTILINE),
        re.compile(rf"\b{words}\b(?!')"),
    )
