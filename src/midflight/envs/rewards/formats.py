"""The form of a response: a regular expression, and the tags of reasoning models."""

from __future__ import annotations

import re

from midflight.envs.patterns import compiled
from midflight.types import Problem


class Regex:
    """Reward 1 if the pattern matches the whole response, else 0; a dot matches line breaks, too.

    With `search`, a match anywhere in the response is enough.
    """

    def __init__(self, *, pattern: str, search: bool = False, ignore_case: bool = False) -> None:
        expression = compiled(
            "task.rewards: regex: pattern", pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0)
        )
        self._matches = expression.search if search else expression.fullmatch

    def __call__(self, problem: Problem, response: str) -> float:
        return float(self._matches(response) is not None)


_THINK = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)


def think_format(problem: Problem, response: str, *, opened_by_prompt: bool = False) -> float:
    """Return 1 if the response is `<think>`, a thought, `</think>` and an answer, each once and not empty, else 0.

    With `opened_by_prompt`, the prompt ends with `<think>`, and the response begins with the thought.
    """
    match = _THINK.fullmatch(f"<think>{response}" if opened_by_prompt else response)
    if match is None or not match["thought"].strip() or not match["answer"].strip():
        return 0.0
    return float(not re.search("</?think>", match["thought"] + match["answer"]))
