"""Routing of problems to the task and to evaluation sets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from midflight.actor.grading import LiveEpisodes
from midflight.envs.one_turn import wants_group
from midflight.envs.routing import Router, as_problem_of
from midflight.envs.running_sums import RunningSums
from midflight.testing.fakes import CountingEnvironment
from midflight.types import Grade, Problem, RolloutId


@dataclass
class Named(CountingEnvironment):
    """Environment that grades with its own number, and remembers the source of the problem."""

    number: float

    def grade(self, problem: Problem, response: str) -> Grade:
        return Grade(self.number, answer=problem.source)


def reward_of(router: Router, problem: Problem) -> Grade | None:
    return LiveEpisodes(router).answer(RolloutId(0), problem, ["x"]).grade


def test_every_problem_is_graded_by_its_own_environment() -> None:
    router = Router(Named(1.0), {"a": Named(2.0), "b.c": Named(3.0)})
    problem = Problem("7", "7")
    rewards = [
        reward_of(router, item) for item in (problem, as_problem_of("a", problem), as_problem_of("b.c", problem))
    ]
    assert [grade and grade.reward for grade in rewards] == [1.0, 2.0, 3.0]


def test_the_source_of_the_environment_is_restored() -> None:
    problem = as_problem_of("a", Problem("7", "7", source="eval/of/its own"))
    grade = reward_of(Router(Named(1.0), {"a": Named(2.0)}), problem)
    assert grade
    assert grade.answer == "eval/of/its own"


def test_sources_of_the_task_stay_with_the_task() -> None:
    router = Router(Named(1.0), {"a": Named(2.0)})
    for source in ("a", "eval", "eval/b/", "a/eval"):
        grade = reward_of(router, Problem("7", "7", source=source))
        assert grade
        assert (grade.reward, grade.answer) == (1.0, source)


def test_training_problems_come_from_the_task() -> None:
    router = Router(CountingEnvironment(), {"a": Named(2.0)})
    assert router.problem(3).prompt == "3"
    assert [problem.problem_id for problem in router.held_out_problems(2)] == ["-1", "-2"]


def test_groups_are_graded_where_their_environment_wants_them() -> None:
    class Grouped(Named):
        def grade_group(self, problem: Problem, responses: Sequence[str]) -> list[Grade]:
            return [Grade(self.number * len(responses)) for _ in responses]

    router = Router(Named(1.0), {"a": Grouped(2.0)})
    problem = Problem("7", "7")
    assert [wants_group(router, item) for item in (problem, as_problem_of("a", problem))] == [False, True]
    assert router.grade_group(as_problem_of("a", problem), ["x", "y"]) == [Grade(4.0), Grade(4.0)]


def test_episodes_of_several_turns_do_not_share_state() -> None:
    turns = RunningSums(num_turns=2)
    router = Router(CountingEnvironment(), {"turns": turns})
    first, second = (as_problem_of("turns", turns.problem(index)) for index in range(2))
    one, two = copy.copy(router), copy.copy(router)
    assert [one.reset(first), two.reset(second)] == [turns.reset(item) for item in (first, second)]
    answers = first.answer.split(",")
    assert isinstance(one.step(f"={answers[0]}"), str)
    assert two.step("=0") == Grade(0.0, {"accuracy": 0.0})
    assert one.step(f"={answers[1]}") == Grade(1.0, {"accuracy": 1.0})
