"""The one boundary to what users write to judge answers: whatever it does becomes a grade or a reason."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from midflight.protocols import Environment
from midflight.types import FinishReason, GeneratedTokens, Grade, GradedResponse, Problem, RolloutId

_MAX_REASON = 500  # characters: it goes into a log line and, at worst, into the one line that ends the run


def response_text(tokenizer: Any, generated: GeneratedTokens, finish_reason: FinishReason | None) -> str:
    """What a verifier reads: without the token that ended it."""
    stopped = finish_reason is FinishReason.STOP
    text: str = tokenizer.decode(generated.token_ids[: -1 if stopped else None])
    return text


def grade_response(environment: Environment, rollout_id: RolloutId, problem: Problem, response: str) -> GradedResponse:
    """The environment's grade if it is one, else why not, in one line; never raises."""
    try:
        grade = environment.grade(problem, response)
        return GradedResponse(rollout_id, _checked(grade))
    except (Exception, SystemExit) as error:
        return GradedResponse(rollout_id, None, _reason(error))


def _checked(grade: object) -> Grade:
    """Raises: TypeError, ValueError."""
    if not isinstance(grade, Grade):
        raise TypeError(f"grade() returned a {type(grade).__name__}, not a Grade")
    components = {}
    for name, value in grade.components.items():
        if not isinstance(name, str):
            raise TypeError(f"a component is named {name!r}, which is no string")
        components[name] = _number(f"component {name!r}", value)
    return Grade(_number("reward", grade.reward), components)


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"the {name} is a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the {name} is {number}")
    return number


def _reason(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # their own exception, which cannot even say what it is
        text = "(it has no text)"
    return f"{type(error).__name__}: {text}"[:_MAX_REASON]
