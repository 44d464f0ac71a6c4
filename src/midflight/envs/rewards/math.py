"""Mathematical equality of the final answer and the right answer, by the library math-verify."""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from midflight.errors import MissingExtraError, RecipeError
from midflight.types import Grade, Problem

_MAX_CACHED = 4096  # right answers; the responses of a group share one
# The library's timeouts use signals, which exist in the main thread only.
_PARSE_TIMEOUT_S, _VERIFY_TIMEOUT_S = 2, 2


class Math:
    """Reward 1 if the final answer of the response equals `problem.answer`, else 0.

    The right answer may be LaTeX with or without dollar signs, `\\boxed{...}`, or a plain expression or number. In the
    response, a boxed answer counts before others, then an announced one ("the final answer is ..."), then the last
    expression; with `boxed`, nothing else than a boxed answer counts. Numbers are compared after rounding to
    `precision` decimal places. A right answer that cannot be parsed is an error.
    """

    def __init__(self, *, boxed: bool = False, precision: int = 6, strict: bool = True) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtraError("math-verify", "tasks")
        if precision < 0:
            raise RecipeError(f"task.rewards: math: precision = {precision} is negative; 6 would work")
        self._boxed, self._precision, self._strict = boxed, precision, strict
        self._gold = functools.lru_cache(maxsize=_MAX_CACHED)(self._parsed_gold)

    def __call__(self, problem: Problem, response: str) -> Grade:
        library = _library()
        found = self._parsed(response)
        if not found:
            return Grade(0.0)
        is_right = library.verify(
            list(self._gold(problem.answer)),
            found,
            float_rounding=self._precision,
            strict=self._strict,
            timeout_seconds=_timeout(_VERIFY_TIMEOUT_S),
        )
        return Grade(float(is_right), answer=str(found[-1]))

    def _parsed(self, response: str) -> list[Any]:
        library = _library()
        targets = library.boxed_targets if self._boxed else library.targets
        return library.parse(response, targets, parsing_timeout=_timeout(_PARSE_TIMEOUT_S))

    def _parsed_gold(self, answer: str) -> Sequence[Any]:
        """Return the right answer in the library's form. Raises: ValueError if it is no expression."""
        library = _library()
        # The library takes LaTeX in dollar signs or a box only; it would find the 1 in x + 1.
        in_dollars = f"${answer}$"
        is_latex = re.search(r"[A-Za-z\\^_{]", answer) and not re.search(r"\$|\\boxed|\\\(|\\\[", answer)
        for text in (in_dollars, answer) if is_latex else (answer, in_dollars):
            if parsed := library.parse(text, library.targets, parsing_timeout=_timeout(_PARSE_TIMEOUT_S)):
                return tuple(parsed)
        raise ValueError(f"the right answer {answer!r} is not a mathematical expression")


class _Library(NamedTuple):
    parse: Callable[..., list[Any]]
    verify: Callable[..., bool]
    targets: Sequence[Any]
    boxed_targets: Sequence[Any]


@functools.cache
def _library() -> _Library:
    """Import math-verify, which takes a second, and return what rewards use."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # no warning per response that takes too long
    boxed = math_verify.LatexExtractionConfig(boxed_match_priority=0)
    return _Library(
        math_verify.parse,
        math_verify.verify,
        (boxed, math_verify.ExprExtractionConfig()),
        (math_verify.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),),
    )


def _timeout(seconds: int) -> int | None:
    return seconds if threading.current_thread() is threading.main_thread() else None
