"""One environment for the task and all evaluation sets, so that one pool of grading processes serves all of them.

The `source` of a problem says which environment made it: "eval/NAME/..." is the set NAME, everything else the task.
Behind the name follows the source that the environment itself gave the problem.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

from midflight.envs.one_turn import GroupGradedTask, wants_group, with_turns
from midflight.protocols import Environment, GradedTask
from midflight.types import Grade, Problem, Text

_PREFIX = "eval"


class Router:
    """Implements Environment. Training problems come from the task."""

    def __init__(self, task: Environment | GradedTask, sets: Mapping[str, Environment | GradedTask]) -> None:
        self._task, self._sets = task, dict(sets)
        self._episode: Environment | None = None

    def problem(self, index: int) -> Problem:
        return self._task.problem(index)

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        return self._task.held_out_problems(num_problems)

    def reset(self, problem: Problem) -> Text:
        environment, problem = self._routed(problem)
        self._episode = copy.copy(with_turns(environment))
        return self._episode.reset(problem)

    def step(self, response: str) -> Text | Grade:
        assert self._episode, "step() before reset()"
        return self._episode.step(response)

    def wants_groups(self, problem: Problem) -> bool:
        return wants_group(*self._routed(problem))

    def grade_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Grade | BaseException]:
        environment, problem = self._routed(problem)
        assert isinstance(environment, GroupGradedTask)
        return environment.grade_group(problem, responses)

    def _routed(self, problem: Problem) -> tuple[Environment | GradedTask, Problem]:
        """Return the environment of a problem, and the problem as that environment made it."""
        prefix, _, rest = problem.source.partition("/")
        name, _, source = rest.partition("/")
        if prefix != _PREFIX or name not in self._sets:
            return self._task, problem
        return self._sets[name], replace(problem, source=source)


def as_problem_of(name: str, problem: Problem) -> Problem:
    """Return the problem with the name of its evaluation set in `source`."""
    return replace(problem, source=f"{_PREFIX}/{name}/{problem.source}")
