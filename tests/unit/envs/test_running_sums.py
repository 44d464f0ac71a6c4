"""Chain sums in turns: the texts of the turns, and their grades."""

from __future__ import annotations

import copy

import pytest

from midflight.envs.chain_sums import is_held_out
from midflight.envs.running_sums import RunningSums
from midflight.errors import RecipeError
from midflight.protocols import Environment
from midflight.types import Grade, Problem

EXAMPLE = Problem("example", "a3b9:c4d2:e1f1:", "12,18,20")


def episode(responses: list[str]) -> list[str | Grade]:
    environment = RunningSums(num_turns=3)
    return [environment.reset(EXAMPLE), *(environment.step(response) for response in responses)]


def test_right_turn_leads_to_the_next_turn() -> None:
    answers = episode(["a3,3b9,12=12", "=18", "=20"])
    assert answers == ["a3b9:", "c4d2:", "e1f1:", Grade(1.0, {"accuracy": 1.0})]


@pytest.mark.parametrize(("responses", "reward"), [(["=11"], 0.0), (["12"], 0.0), (["=12", "=6"], 1 / 3)])
def test_wrong_turn_ends_the_episode(responses: list[str], reward: float) -> None:
    assert episode(responses)[-1] == Grade(reward, {"accuracy": 0.0})


def test_problems_are_reproducible_and_split() -> None:
    environment = RunningSums(seed=3, num_turns=2)
    assert isinstance(environment, Environment)
    for index in range(50):
        problem = environment.problem(index)
        assert problem == RunningSums(seed=3, num_turns=2).problem(index)
        assert not is_held_out(problem.text)
        terms = [int(digit) for digit in problem.text if digit.isdigit()]
        assert problem.answer == f"{sum(terms[:2])},{sum(terms)}"
    held_out = environment.held_out_problems(20)
    assert held_out == RunningSums(seed=4).held_out_problems(20)
    assert all(is_held_out(problem.text) for problem in held_out)


def test_episodes_of_one_environment_are_independent() -> None:
    environment = RunningSums(num_turns=3)
    episodes = [copy.copy(environment) for _ in range(2)]
    for copied in episodes:
        copied.reset(EXAMPLE)
    assert episodes[0].step("=12") == "c4d2:"
    assert episodes[1].step("=13") == Grade(0.0, {"accuracy": 0.0})
    assert episodes[0].step("=18") == "e1f1:"


def test_too_many_terms_are_refused() -> None:
    with pytest.raises(RecipeError, match="num_turns = 20 times terms_per_turn = 2 is out of range; 2 to 26"):
        RunningSums(num_turns=20)
