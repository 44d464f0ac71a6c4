"""The one boundary to what users write to judge answers: whatever it does becomes a grade or a reason."""

from __future__ import annotations

import math
from numbers import Real

from midflight.protocols import Environment
from midflight.types import Grade, GradedResponse, Problem, RolloutId


def grade_response(environment: Environment, rollout_id: RolloutId, problem: Problem, response: str) -> GradedResponse:
    """The environment's grade if it is one, else why not; never raises."""
    try:
        grade = environment.grade(problem, response)
        return GradedResponse(rollout_id, _checked(grade))
    except (Exception, SystemExit) as error:
        return GradedResponse(rollout_id, None, f"{type(error).__name__}: {error}")


def _checked(grade: object) -> Grade:
    """Raises: TypeError, ValueError."""
    if not isinstance(grade, Grade):
        raise TypeError(f"grade() returned a {type(grade).__name__}, not a Grade")
    values = {"reward": grade.reward, **grade.components}
    for name, value in values.items():
        if not isinstance(value, Real):
            raise TypeError(f"the {name} is a {type(value).__name__}, not a number")
        if not math.isfinite(value):
            raise ValueError(f"the {name} is {value}")
    return Grade(float(grade.reward), {name: float(value) for name, value in grade.components.items()})
