"""Tasks of one turn: the adapter from `grade(problem, response)` to an environment, and grades of whole groups."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from midflight.protocols import Environment, GradedTask
from midflight.types import Grade, Problem, Text


class OneTurn:
    """Implements Environment: `reset` returns the problem's prompt, and the grade of the first response ends it."""

    def __init__(self, task: GradedTask) -> None:
        self._task = task
        self._problem: Problem | None = None

    def problem(self, index: int) -> Problem:
        return self._task.problem(index)

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        return self._task.held_out_problems(num_problems)

    def reset(self, problem: Problem) -> Text:
        self._problem = problem
        return problem.prompt

    def step(self, response: str) -> Grade:
        assert self._problem, "step() before reset()"
        grade: object = self._task.grade(self._problem, response)
        if not isinstance(grade, Grade):
            raise TypeError(f"grade() returned a {type(grade).__name__}, not a Grade")
        return grade


@runtime_checkable
class GroupGradedTask(Protocol):
    """A task that grades all responses to a problem together, instead of one after another.

    `wants_groups` is optional: False, or a function of the problem that returns False, grades one after another.
    """

    def grade_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Grade | BaseException]:
        """Return one grade per response. An exception in the list fails its rollout; a raised one fails them all."""
        ...


def grade_alone(task: GroupGradedTask, problem: Problem, response: str) -> Grade:
    """Return the grade of a response that is a group of its own. Raises: the exception in the place of its grade."""
    (grade,) = task.grade_group(problem, [response])
    if isinstance(grade, BaseException):
        raise grade
    return grade


def wants_group(environment: object, problem: Problem) -> bool:
    """True if the environment grades all responses to this problem together."""
    if not isinstance(environment, GroupGradedTask):
        return False
    wants: bool | Callable[[Problem], bool] = getattr(environment, "wants_groups", True)
    return wants(problem) if callable(wants) else wants


def with_turns(environment: Environment | GradedTask) -> Environment:
    """Return the environment itself, or a GradedTask as an environment of one turn."""
    return environment if isinstance(environment, Environment) else OneTurn(environment)


def first_text(environment: Environment | GradedTask, problem: Problem) -> Text:
    """Return the prompt of an episode, from a copy of the environment that is then discarded.

    Raises: TypeError if it is neither text nor messages; any error of the environment.
    """
    return checked_text(copy.copy(with_turns(environment)).reset(problem), "reset()")


def checked_text(text: object, method: str) -> Text:
    """Return the text or the messages that `method` returned, as they are. Raises: TypeError."""
    if isinstance(text, str):
        return text
    if not isinstance(text, list):
        raise TypeError(f"{method} returned a {type(text).__name__}, neither text nor messages")
    for message in text:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise TypeError(f"{method} returned a message {message!r}, not a dict with role and content")
        if not isinstance(message.get("content"), str):
            raise TypeError(f"{method} returned a message whose content is a {type(message.get('content')).__name__}")
    return text
