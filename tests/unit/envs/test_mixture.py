"""Mixtures: shares by weight, no skipped problem of a source, routing, held-out problems."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dataset_files import dataset_task, sums, write_lines
from midflight.actor.grading import LiveEpisodes
from midflight.config.tasks import DatasetSource
from midflight.envs.chain_sums import ChainSums, solution
from midflight.envs.datasets.task import DatasetTask
from midflight.envs.mixture import Draws, Mixture, Share, build_mixture
from midflight.envs.one_turn import wants_group
from midflight.envs.rewards.signatures import reward_function
from midflight.envs.rewards.terms import Rewards, Term
from midflight.envs.running_sums import RunningSums
from midflight.errors import RecipeError
from midflight.protocols import Environment
from midflight.types import Grade, Problem, RolloutId
from narrowing import instance


class Numbers:
    """Implements GradedTask: problem `index` asks for `index`."""

    def __init__(self, num_held_out: int = 100) -> None:
        self._num_held_out = num_held_out

    def problem(self, index: int) -> Problem:
        return Problem(f"number {index}", str(index), str(index))

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        return [Problem(f"held out {n}", f"-{n}", "") for n in range(min(num_problems, self._num_held_out))]

    def grade(self, problem: Problem, response: str) -> Grade:
        return Grade(float(response == problem.answer))


def mixture(weights: Sequence[float], seed: int = 0) -> Mixture:
    return build_mixture([Share(str(index), weight, Numbers()) for index, weight in enumerate(weights)], seed, "task")


def test_each_source_has_its_share() -> None:
    draws = Draws([1, 2, 5], seed=0)
    drawn = Counter(draws.draw(index)[0] for index in range(4000))
    assert [drawn[source] / 500 for source in range(3)] == pytest.approx([1, 2, 5], rel=0.1)


def test_no_problem_of_a_source_is_skipped() -> None:
    task = mixture([1, 0.01, 3])
    seen: dict[str, list[int]] = {"0": [], "1": [], "2": []}
    for index in range(2500):
        problem = task.problem(index)
        seen[problem.source].append(int(problem.answer))
    assert all(answers == list(range(len(answers))) for answers in seen.values())
    assert all(seen.values())


def test_draw_does_not_depend_on_earlier_calls() -> None:
    in_order = Draws([1, 2], seed=4)
    expected = [in_order.draw(index) for index in range(5000)]
    indices = list(range(5000))
    random.Random(0).shuffle(indices)
    draws = Draws([1, 2], seed=4)
    assert [draws.draw(index) for index in indices] == [expected[index] for index in indices]


def test_draws_are_those_of_earlier_versions() -> None:
    draws = Draws([1, 2, 1], seed=3)
    assert [draws.draw(index) for index in (0, 1, 100_000)] == [(1, 0), (1, 1), (2, 25053)]


def test_held_out_problems_come_in_proportion() -> None:
    shares = [Share("few", 1, Numbers(num_held_out=2)), Share("many", 3, Numbers())]
    held_out = Mixture(shares).held_out_problems(20)
    assert Counter(problem.source for problem in held_out) == {"few": 2, "many": 15}


def test_responses_go_to_the_source_of_the_problem(tmp_path: Path) -> None:
    task = build_mixture(
        [Share("chains", 1, ChainSums()), Share("rows", 1, dataset_task(tmp_path / "sums.jsonl", sums(9)))], 0, "task"
    )
    assert not isinstance(task, Environment)
    problems = [task.problem(index) for index in range(20)]
    assert {problem.source for problem in problems} == {"chains", "rows"}
    for problem in problems:
        right = solution(problem) if problem.source == "chains" else problem.answer
        assert task.grade(problem, right).reward == 1
        assert task.grade(problem, "").reward == 0


def test_sources_with_one_and_several_turns_mix() -> None:
    task = build_mixture([Share("turns", 1, RunningSums(num_turns=2)), Share("one", 1, ChainSums())], 0, "task")
    episodes = LiveEpisodes(task)
    for index in range(20):
        problem = task.problem(index)
        if problem.source == "one":
            answers = [episodes.answer(RolloutId(index), problem, [solution(problem)])]
        else:
            first, second = (f"={total}" for total in problem.answer.split(","))
            answers = [episodes.answer(RolloutId(index), problem, [first])]
            answers.append(episodes.answer(RolloutId(index), problem, [first, second]))
            assert answers[0].text
        grade: Any = answers[-1].grade
        assert grade.reward == 1


def test_two_sources_with_one_name_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"^task\.sources: 2 sources have the name 'a'; give each its own$"):
        build_mixture([Share("a", 1, Numbers()), Share("a", 2, Numbers())], 0, "task")


def test_only_sources_with_group_rewards_get_groups(tmp_path: Path) -> None:
    def best(problem: Problem, responses: Sequence[str]) -> list[float]:
        return [float(len(response) == max(map(len, responses))) for response in responses]

    rewards = Rewards([Term("best", reward_function("best", best, {}))])
    rows = DatasetSource(path=write_lines(tmp_path / "sums.jsonl", sums(9)), prompt="question")
    task = Mixture([Share("rows", 1, DatasetTask(rows, rewards=rewards)), Share("numbers", 1, Numbers())])
    problems = {problem.source: problem for problem in map(task.problem, range(20))}
    assert wants_group(task, problems["rows"])
    assert not wants_group(task, problems["numbers"])
    grades = [instance(grade, Grade) for grade in task.grade_group(problems["rows"], ["a", "bb"])]
    assert [grade.reward for grade in grades] == [0, 1]
