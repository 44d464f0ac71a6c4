"""The one boundary to the user's grading code: whatever the code does becomes an answer or a reason."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

from midflight.actor.failures import log_once, reason_of
from midflight.envs.one_turn import GroupGradedTask, checked_text, with_turns
from midflight.protocols import Environment, GradedTask
from midflight.types import Grade, GradedResponse, Problem, RolloutId

_MAX_LIVE_EPISODES = 4096  # a dropped episode is repeated from its responses when it continues


class LiveEpisodes:
    """Episodes of one process, by rollout. Each episode is a shallow copy of the environment."""

    def __init__(self, environment: Environment | GradedTask) -> None:
        self._task, self._environment = environment, with_turns(environment)
        self._live: dict[RolloutId, _Episode] = {}  # continuing episodes, longest idle first

    def answer(self, rollout_id: RolloutId, problem: Problem, responses: Sequence[str]) -> GradedResponse:
        """Return the environment's answer to the last response, or a one-line reason for its failure; never raises."""
        try:
            episode = self._continued(rollout_id, problem, responses[:-1])
            answer: object = episode.environment.step(responses[-1])
            if not isinstance(answer, str | list):
                return GradedResponse(rollout_id, _checked(answer))
            text = checked_text(answer, "step()")
            episode.responses.append(responses[-1])
            self._live[rollout_id] = episode
            if len(self._live) > _MAX_LIVE_EPISODES:
                del self._live[next(iter(self._live))]
            return GradedResponse(rollout_id, None, text=text)
        except (Exception, SystemExit) as error:
            log_once(error)
            return GradedResponse(rollout_id, None, reason_of(error))

    def answer_group(
        self, rollout_ids: Sequence[RolloutId], problem: Problem, responses: Sequence[str]
    ) -> list[GradedResponse]:
        """Return the grades of responses to one problem, or the reasons for failures, in order; never raises."""
        try:
            assert isinstance(self._task, GroupGradedTask), "a group for a task without grade_group()"
            grades: Sequence[object] = self._task.grade_group(problem, responses)
            if len(grades) != len(responses):
                raise ValueError(f"grade_group() returned {len(grades)} grades for {len(responses)} responses")
        except (Exception, SystemExit) as error:
            grades = [error] * len(responses)
        return [_answer(rollout_id, grade) for rollout_id, grade in zip(rollout_ids, grades, strict=True)]

    def _continued(self, rollout_id: RolloutId, problem: Problem, earlier: Sequence[str]) -> _Episode:
        """Return the live episode, or a new one after repeating the earlier responses in it."""
        episode = self._live.pop(rollout_id, None)
        if episode is None or episode.problem != problem or episode.responses != earlier[: len(episode.responses)]:
            episode = _Episode(problem, copy.copy(self._environment))
            episode.environment.reset(problem)
        for response in earlier[len(episode.responses) :]:
            if isinstance(episode.environment.step(response), Grade):
                raise RuntimeError(
                    "the environment ended an episode that it continued before, after the same responses; step() must"
                    " depend on the problem and the responses only"
                )
            episode.responses.append(response)
        return episode


@dataclass(slots=True)
class _Episode:
    problem: Problem
    environment: Environment
    responses: list[str] = field(default_factory=list)  # taken so far


def _answer(rollout_id: RolloutId, grade: object) -> GradedResponse:
    """Return the answer for one member of a group; an error is a failure."""
    try:
        if isinstance(grade, BaseException):
            raise grade
        return GradedResponse(rollout_id, _checked(grade, "grade_group() returned a {}, not a Grade"))
    except (Exception, SystemExit) as error:
        log_once(error)
        return GradedResponse(rollout_id, None, reason_of(error))


def _checked(grade: object, complaint: str = "step() returned a {}, neither text nor a Grade") -> Grade:
    """Return the grade with its numbers as floats.

    Raises: TypeError, ValueError.
    """
    if not isinstance(grade, Grade):
        raise TypeError(complaint.format(type(grade).__name__))
    if not isinstance(grade.answer, str | None):
        raise TypeError(f"the answer is a {type(grade.answer).__name__}, not a string")
    components = {}
    for name, value in grade.components.items():
        if not isinstance(name, str):
            raise TypeError(f"a component has the name {name!r}, which is not a string")
        components[name] = _number(f"component {name!r}", value)
    return Grade(_number("reward", grade.reward), components, grade.answer)


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"the {name} is a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the {name} is {number}")
    return number
