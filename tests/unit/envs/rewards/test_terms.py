"""Weighted sums of rewards: components, answers, groups, and the reasons of failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from midflight.actor.grading import LiveEpisodes
from midflight.config.tasks import RewardTerm
from midflight.envs.rewards.terms import RewardError, Rewards
from midflight.errors import RecipeError
from midflight.launch.rewards import build_rewards
from midflight.testing.fakes import CountingEnvironment
from midflight.types import Grade, Problem, RolloutId

FILE = "tests/unit/envs/rewards/test_terms.py"
PROBLEM = Problem("set/7", [{"role": "user", "content": "2 + 2?"}], answer="4", columns={"limit": 3})


def length(problem: Problem, response: str, *, scale: float = 1.0) -> float:
    return scale * len(response)


def verbose(problem: Problem, response: str) -> Grade:
    return Grade(0.5, {"words": len(response.split())}, answer=response.split()[-1])


def bad(problem: Problem, response: str, *, value: Any) -> Any:
    return value


def divides(problem: Problem, response: str) -> float:
    if not response:
        raise ZeroDivisionError("no response")
    return 1 / len(response)


def ranks(problem: Problem, responses: list[str]) -> list[float]:
    return [float(sorted(responses).index(response)) for response in responses]


def ranks_badly(problem: Problem, responses: list[str]) -> list[float]:
    return [0.0]


def rewards(*terms: str | dict[str, Any]) -> Rewards:
    def own(term: dict[str, Any]) -> dict[str, Any]:
        name = term["type"]
        return term | {"type": name if name in ("exact", "math") else f"{__name__}:{name}"}

    return build_rewards(
        [RewardTerm.model_validate(own({"type": term} if isinstance(term, str) else term)) for term in terms]
    )


def test_reward_is_the_weighted_sum_and_components_are_unweighted() -> None:
    built = rewards({"type": "exact", "weight": 2.0}, {"type": "length", "weight": -0.1, "options": {"scale": 10}})
    assert built.grade(PROBLEM, "4") == Grade(1.0, {"exact": 1.0, "length": 10.0}, answer="4")


def test_weight_zero_only_measures() -> None:
    assert rewards({"type": "length", "weight": 0}).grade(PROBLEM, "abc") == Grade(0.0, {"length": 3.0})


def test_components_of_a_term_follow_its_name() -> None:
    grade = rewards("length", {"type": "verbose", "name": "style"}).grade(PROBLEM, "it is 4")
    assert grade.components == {"length": 7.0, "style": 0.5, "style/words": 3.0}
    assert grade.answer == "4"


def test_first_answer_counts() -> None:
    assert rewards("verbose", "exact").grade(PROBLEM, "it is 5").answer == "5"
    assert rewards("exact", "verbose").grade(PROBLEM, "it is 5").answer == "it is 5"


def test_equal_names_are_refused() -> None:
    with pytest.raises(RecipeError, match="2 terms have the name 'length'; give each an own one"):
        rewards("length", {"type": "length", "options": {"scale": 2}})
    assert not rewards("length", {"type": "length", "name": "length_2"}).wants_groups


def test_names_of_other_metrics_are_refused() -> None:
    with pytest.raises(RecipeError, match="length: name = 'mean' is a metric of the run; use another one"):
        rewards({"type": "length", "name": "mean"})


def test_group_is_graded_together_with_plain_terms() -> None:
    built = rewards("ranks", {"type": "length", "weight": 0.5})
    assert built.wants_groups
    assert built.grade_group(PROBLEM, ["b", "cc", "a"]) == [
        Grade(1.5, {"ranks": 1.0, "length": 1.0}),
        Grade(3.0, {"ranks": 2.0, "length": 2.0}),
        Grade(0.5, {"ranks": 0.0, "length": 1.0}),
    ]
    assert built.grade(PROBLEM, "cc") == Grade(1.0, {"ranks": 0.0, "length": 2.0})


def test_plain_term_fails_only_its_own_response() -> None:
    first, second, third = rewards("ranks", "divides").grade_group(PROBLEM, ["b", "", "a"])
    assert isinstance(first, Grade)
    assert isinstance(second, RewardError)
    assert isinstance(third, Grade)
    assert "divides, problem 'set/7': ZeroDivisionError: " in str(second)


@pytest.mark.parametrize("value", [True, np.float32(1.0), np.bool_(True), np.array(1.0), 1, {"score": 1.0}])
def test_numbers_of_other_types_count(value: object) -> None:
    assert rewards({"type": "bad", "options": {"value": value}}).grade(PROBLEM, "").reward == 1.0


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (math.nan, "nan, not a finite number"),
        (-math.inf, "-inf, not a finite number"),
        (None, "None, not a number"),
        ("high", "'high' of type str, not a number"),
        ([1.0], "[1.0] of type list, not a number"),
        ({"reward": 1.0}, "a dict without 'score', which has 'reward'"),
        (Grade(math.nan), "nan, not a finite number"),
        (Grade(1.0, {"x": None}), "None, not a number"),  # type: ignore[dict-item]
    ],
)
def test_bad_value_names_function_problem_and_place(value: object, described: str) -> None:
    with pytest.raises(RewardError) as raised:
        rewards({"type": "bad", "options": {"value": value}}).grade(PROBLEM, "")
    text = str(raised.value)
    assert text.startswith(f"{__name__}:bad returned {described}, for problem 'set/7' (")
    assert text.endswith(f"test_terms.py:{bad.__code__.co_firstlineno})")


class Task(CountingEnvironment):
    """Task that grades with some rewards, alone or in groups."""

    def __init__(self, built: Rewards) -> None:
        super().__init__()
        self.grade = built.grade  # type: ignore[method-assign]
        self.grade_group = built.grade_group


@pytest.mark.parametrize(
    ("term", "expected", "line"),
    [
        (
            "divides",
            "divides, problem 'set/7': ZeroDivisionError: no response",
            lambda: divides.__code__.co_firstlineno + 2,
        ),
        (
            {"type": "bad", "options": {"value": None}},
            "bad returned None, not a number, for problem 'set/7'",
            lambda: bad.__code__.co_firstlineno,
        ),
    ],
)
def test_reason_of_a_failed_rollout_has_function_problem_and_place(
    term: str | dict[str, Any], expected: str, line: Callable[[], int]
) -> None:
    episodes = LiveEpisodes(Task(rewards(term)))
    alone = episodes.answer(RolloutId(1), PROBLEM, [""])
    (together,) = episodes.answer_group([RolloutId(1)], PROBLEM, [""])
    assert alone.failure == together.failure == f"RewardError: {__name__}:{expected} ({FILE}:{line()})"


def test_group_list_of_wrong_length_is_an_error() -> None:
    with pytest.raises(RewardError, match="ranks_badly returned a list of 1 values for 2 responses, for problem"):
        rewards("ranks_badly").grade_group(PROBLEM, ["a", "b"])


def test_no_terms_give_zero() -> None:
    nothing: Sequence[RewardTerm] = ()
    assert build_rewards(nothing).grade(PROBLEM, "4") == Grade(0.0)
