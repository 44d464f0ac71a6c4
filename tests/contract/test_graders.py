"""Contract of every grader: each response comes back once, with a grade or with the reason for its absence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from midflight.actor.grading_pool import GradingPool
from midflight.protocols import Grader
from midflight.testing.fakes import ImmediateGrader
from midflight.types import Grade, GradedResponse, Problem, RolloutId
from obedient_environment import ObedientEnvironment, ObedientGroups, ObedientTurns

TIMEOUT_S = 60.0
PROBLEM = Problem("0", "0", "0")


@pytest.fixture(scope="module", params=["immediate", "pool"])
def grader(request: pytest.FixtureRequest) -> Iterator[Grader]:
    """Grader shared by all tests; each test leaves nothing pending."""
    if request.param == "immediate":
        yield ImmediateGrader(ObedientEnvironment())
        return
    with GradingPool(ObedientEnvironment, num_processes=2, timeout_s=TIMEOUT_S) as pool:
        yield pool


@pytest.fixture(scope="module", params=["immediate", "pool"])
def turns(request: pytest.FixtureRequest) -> Iterator[Grader]:
    """Grader of an environment with several turns."""
    if request.param == "immediate":
        yield ImmediateGrader(ObedientTurns())
        return
    with GradingPool(ObedientTurns, num_processes=2, timeout_s=TIMEOUT_S) as pool:
        yield pool


@pytest.fixture(scope="module", params=["immediate", "pool"])
def groups(request: pytest.FixtureRequest) -> Iterator[Grader]:
    """Grader of an environment that grades whole groups."""
    if request.param == "immediate":
        yield ImmediateGrader(ObedientGroups())
        return
    with GradingPool(ObedientGroups, num_processes=2, timeout_s=TIMEOUT_S) as pool:
        yield pool


def answers(grader: Grader, episodes: dict[int, list[str]]) -> dict[int, GradedResponse]:
    """Return the answer to the last response of each episode."""
    for rollout_id, responses in episodes.items():
        grader.submit(RolloutId(rollout_id), PROBLEM, responses)
    results: list[GradedResponse] = []
    while grader.num_pending:
        results += grader.results(TIMEOUT_S)
    return {result.rollout_id: result for result in results}


def graded(grader: Grader, responses: list[str]) -> list[GradedResponse]:
    """Return the answers in the order of the responses, each exactly once."""
    for index, response in enumerate(responses):
        grader.submit(RolloutId(index), PROBLEM, [response])
    assert grader.num_pending == len(responses)
    results: list[GradedResponse] = []
    while grader.num_pending:
        new = grader.results(TIMEOUT_S)
        assert new, "no result arrived"
        results += new
        assert grader.num_pending == len(responses) - len(results)
    assert grader.results() == []
    assert sorted(result.rollout_id for result in results) == list(range(len(responses)))
    return sorted(results, key=lambda result: result.rollout_id)


def test_every_response_comes_back_once_with_its_own_grade(grader: Grader) -> None:
    results = graded(grader, [f"reward {index / 8}" for index in range(500)])
    assert results == [GradedResponse(RolloutId(index), Grade(index / 8)) for index in range(500)]


def test_no_responses_give_no_results(grader: Grader) -> None:
    assert grader.num_pending == 0
    assert grader.results() == []
    assert grader.results(60.0) == [], "nothing is pending, so nothing is waited for"


def test_responses_submitted_between_results_are_graded(grader: Grader) -> None:
    returned: list[int] = []
    for index in range(100):
        grader.submit(RolloutId(index), PROBLEM, ["reward 1"])
        returned += [result.rollout_id for result in grader.results()]
    while grader.num_pending:
        returned += [result.rollout_id for result in grader.results(TIMEOUT_S)]
    assert sorted(returned) == list(range(100))


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise no such verifier", "ZeroDivisionError: no such verifier"),
        ("raise_lines", "ZeroDivisionError: one two three"),
        ("raise_unspeakable", "UnspeakableError: (it has no text)"),
        ("no_such_deed", "KeyError: 'no_such_deed'"),
        ("nan", "ValueError: the reward is nan"),
        ("inf", "ValueError: the reward is -inf"),
        ("hidden_nan", "ValueError: the reward is nan"),
        ("reward_of_text", "TypeError: the reward is a str, not a number"),
        ("text", "TypeError: grade() returned a str, not a Grade"),
        ("none", "TypeError: grade() returned a NoneType, not a Grade"),
        ("component_of_text", "TypeError: the component 'style' is a str, not a number"),
        ("nan_component", "ValueError: the component 'style' is nan"),
        ("component_without_name", "TypeError: a component has the name 7, which is not a string"),
        ("no_components", "AttributeError: 'NoneType' object has no attribute 'items'"),
        ("system_exit 3", "SystemExit: 3"),
    ],
)
def test_a_bad_grade_fails_only_its_own_rollout(grader: Grader, response: str, reason: str) -> None:
    before, bad, after = graded(grader, ["reward 1", response, "reward 0"])
    assert (before.grade, after.grade) == (Grade(1.0), Grade(0.0))
    assert (bad.rollout_id, bad.grade) == (1, None)
    assert re.fullmatch(rf"{re.escape(reason)}( \(.*obedient_environment.py:\d+\))?", bad.failure)


def test_a_failure_reason_is_truncated(grader: Grader) -> None:
    (result,) = graded(grader, [f"raise_long {10**7}"])
    assert result.grade is None
    assert result.failure.startswith("ZeroDivisionError: xxx")
    assert len(result.failure) == 500


def test_responses_and_grades_may_be_large(grader: Grader) -> None:
    lengths = [10**6 + index for index in range(8)]
    large = graded(grader, [f"length {'é' * length}" for length in lengths])
    assert [result.grade for result in large] == [Grade(float(length)) for length in lengths]
    many = graded(grader, ["many_components 20000"] * 8)
    assert all(result.grade and len(result.grade.components) == 20_000 for result in many)


def test_a_verifier_may_print(grader: Grader) -> None:
    results = graded(grader, ["print 2000", "reward 1"])
    assert [result.grade for result in results] == [Grade(1.0), Grade(1.0)]


def test_a_verifier_may_use_processes_of_its_own(grader: Grader) -> None:
    results = graded(grader, ["square 7", "square 8"])
    assert [result.grade for result in results] == [Grade(49.0), Grade(64.0)]


def test_an_episode_continues_until_its_grade(turns: Grader) -> None:
    """The earlier turns may have run in any process."""
    said: dict[int, list[str]] = {index: [] for index in range(60)}
    for turn in range(3):
        said = {index: [*responses, f"say {index} {turn}"] for index, responses in said.items()}
        for index, answer in answers(turns, said).items():
            assert (answer.grade, answer.text, answer.failure) == (None, f"{index} {turn}", "")
    ended = answers(turns, {index: [*responses, "count"] for index, responses in said.items()})
    assert [ended[index].grade for index in range(60)] == [Grade(4.0)] * 60


def test_an_unknown_episode_is_repeated_from_its_start(turns: Grader) -> None:
    assert answers(turns, {1: ["say a", "chat b", "count"]})[1].grade == Grade(3.0)


def test_changed_responses_start_another_episode(turns: Grader) -> None:
    """A rollout that lost tokens may give another response the second time."""
    answers(turns, {1: ["say a"]})
    assert answers(turns, {1: ["say b", "said"]})[1].text == "say b, said"
    assert answers(turns, {1: ["said"]})[1].text == "said"


def test_messages_are_returned_as_messages(turns: Grader) -> None:
    assert answers(turns, {1: ["chat hello"]})[1].text == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("responses", "reason"),
    [
        (["say a", "raise no"], "ZeroDivisionError: no"),
        (["say a", "none"], "TypeError: step() returned a NoneType, neither text nor a Grade"),
        (["chat_badly"], "TypeError: step() returned a message whose content is a NoneType"),
        (["count", "say a"], "RuntimeError: the environment ended an episode that it continued before"),
    ],
)
def test_a_failed_turn_fails_only_its_own_rollout(turns: Grader, responses: list[str], reason: str) -> None:
    for index in range(1, len(responses)):
        answers(turns, {1: responses[:index]})
    results = answers(turns, {0: ["say a", "count"], 1: responses, 2: ["say a", "count"]})
    assert results[1].grade is None
    assert results[1].failure.startswith(reason)
    assert results[0].grade == results[2].grade == Grade(2.0)


def test_answers_of_a_group_come_together(groups: Grader) -> None:
    sizes = [1 + index % 5 for index in range(100)]
    group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
    for group, size in enumerate(sizes):
        ids = [RolloutId(index) for index, other in enumerate(group_of) if other == group]
        groups.submit_group(ids, PROBLEM, ["group size", *(["reward 9"] * (size - 1))])
    assert groups.num_pending == len(group_of)
    seen = Counter[int]()
    while groups.num_pending:
        new = groups.results(TIMEOUT_S)
        complete = Counter(group_of[answer.rollout_id] for answer in new)
        assert complete == {group: sizes[group] for group in complete}
        assert all(answer.grade == Grade(float(sizes[group_of[answer.rollout_id]])) for answer in new)
        seen += complete
    assert seen == dict(enumerate(sizes))


def test_an_exception_in_a_group_fails_its_own_rollout(groups: Grader) -> None:
    results = group_graded(groups, ["reward 1", "raise no", "nan", "reward 2"])
    assert [answer.grade for answer in results] == [Grade(1.0), None, None, Grade(2.0)]
    assert results[1].failure.startswith("ZeroDivisionError: no (")
    assert results[2].failure == "ValueError: the reward is nan"


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("raise", "ZeroDivisionError: a group of 3 ("),
        ("short", "ValueError: grade_group() returned 2 grades for 3 responses"),
        ("none", "TypeError: object of type 'NoneType' has no len()"),
        ("numbers", "TypeError: grade_group() returned a float, not a Grade"),
    ],
)
def test_a_failed_group_fails_all_its_rollouts(groups: Grader, action: str, reason: str) -> None:
    results = group_graded(groups, [f"group {action}", "reward 1", "reward 1"])
    assert all(answer.failure.startswith(reason) for answer in results)
    assert [answer.grade for answer in results] == [None] * 3


def group_graded(grader: Grader, responses: list[str]) -> list[GradedResponse]:
    """Return the answers to the responses of one group, which come from one call of `results`."""
    grader.submit_group([RolloutId(index) for index in range(len(responses))], PROBLEM, responses)
    results = grader.results(TIMEOUT_S)
    assert [answer.rollout_id for answer in results] == list(range(len(responses)))
    assert grader.num_pending == 0
    return results
