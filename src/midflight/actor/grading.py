"""The one boundary to what users write to judge answers: whatever it does becomes a grade or a reason."""

from __future__ import annotations

import math
from numbers import Real

from midflight.actor.failures import log_once, reason_of
from midflight.protocols import Environment
from midflight.types import Grade, GradedResponse, Problem, RolloutId


def grade_response(environment: Environment, rollout_id: RolloutId, problem: Problem, response: str) -> GradedResponse:
    """The environment's grade if it is one, else why not, in one line; never raises."""
    try:
        grade = environment.grade(problem, response)
        return GradedResponse(rollout_id, _checked(grade))
    except (Exception, SystemExit) as error:
        log_once(error)
        return GradedResponse(rollout_id, None, reason_of(error))


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
