"""The language of a response, by the library py3langid."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from midflight.errors import MissingExtraError, RecipeError
from midflight.types import Problem

_NO_LANGUAGE = "zxx"
_MAX_CACHED = 4096  # prompts; the responses of a group share one
# Code, mathematics, commands of LaTeX and tags look like a language that no one speaks.
_NO_PROSE = re.compile(r"```.*?(?:```|\Z)|\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)|\\\w+|</?\w+>", re.DOTALL)


class Language:
    """Reward 1 if the response is in the language of the prompt, else 0.

    `language` is an ISO 639-1 code such as "en", which then replaces the prompt's language. `languages` are the
    candidates, which makes short texts more reliable. Code and LaTeX do not count. A text with fewer than `min_letters`
    letters is too short to tell: a response gets 1, and so does every response to such a prompt.
    """

    def __init__(
        self, *, language: str | None = None, languages: Sequence[str] | None = None, min_letters: int = 20
    ) -> None:
        if importlib.util.find_spec("py3langid") is None:
            raise MissingExtraError("py3langid", "tasks")
        self._language, self._min_letters = language, min_letters
        self._languages = None if languages is None else tuple(languages)
        for code in {*(languages or ()), *([language] if language else ())}:
            known = _identifier(None).labels
            if code not in known:
                raise RecipeError(f"task.rewards: language: there is no {code!r}; known are {', '.join(sorted(known))}")
        if language and languages and language not in languages:
            raise RecipeError(f"task.rewards: language: language = {language!r} is not one of languages")
        self._of_prompt = functools.lru_cache(maxsize=_MAX_CACHED)(self._detected)

    def __call__(self, problem: Problem, response: str) -> float:
        expected = self._language or self._of_prompt(problem.text)
        found = self._detected(response)
        return float(expected is None or found is None or found == expected)

    def _detected(self, text: str) -> str | None:
        """Code of the language, or None if the text is too short or no prose."""
        prose = _NO_PROSE.sub(" ", text)
        if sum(map(str.isalpha, prose)) < self._min_letters:
            return None
        code: str = _identifier(self._languages).classify(prose)[0]
        return None if code == _NO_LANGUAGE else code


@functools.cache
def _identifier(languages: tuple[str, ...] | None) -> Any:
    """Load the model, which takes a second."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    if languages:
        identifier.set_languages(list(languages))
    return identifier
