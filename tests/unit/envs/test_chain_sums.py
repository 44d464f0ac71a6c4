"""The chain-sum task: the split, the lengths, the grades and the demonstrations."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.envs.chain_sums import ChainSums, Flaws, demonstration, is_held_out, num_terms, solution
from midflight.errors import RecipeError
from midflight.protocols import GradedTask
from midflight.types import Problem

EXAMPLE = Problem("example", "a3b9c4:", "16")
PERFECT = Flaws(blurt=0.0, slip=0.0, give_up=0.0)

problems = st.builds(lambda seed, index: ChainSums(seed=seed).problem(index), st.integers(0, 99), st.integers(0, 10**9))


def test_documented_example_has_the_documented_solution() -> None:
    assert solution(EXAMPLE) == "a3,3b9,12c4,16=16"
    assert num_terms(EXAMPLE) == 3


@given(problems)
def test_problems_are_well_formed(problem: Problem) -> None:
    assert re.fullmatch(r"(?:[a-x][1-9])+:", problem.text)
    labels, digits = problem.text[:-1:2], problem.text[1::2]
    assert "abcdefghijklmnopqrstuvwx".startswith(labels)
    assert 2 <= num_terms(problem) == len(labels) <= 24
    assert int(problem.answer) == sum(map(int, digits))


# --- the split --------------------------------------------------------------------------------------------------


@given(problems)
def test_no_training_problem_is_held_out(problem: Problem) -> None:
    assert not is_held_out(problem.text)


def test_training_and_held_out_prompts_of_two_terms_are_disjoint() -> None:
    environment = ChainSums(max_terms=2)  # 81 prompts; 2000 draws give every training prompt among them
    trained = {environment.problem(index).prompt for index in range(2000)}
    held_out = {problem.text for problem in environment.held_out_problems(200)}
    assert trained.isdisjoint(held_out)
    assert len(trained) + len(held_out) == 81


def test_about_one_prompt_in_eight_is_held_out() -> None:
    prompts = [f"a{x}b{y}c{z}:" for x in range(1, 10) for y in range(1, 10) for z in range(1, 10)]
    assert 0.09 < sum(map(is_held_out, prompts)) / len(prompts) < 0.16


def test_held_out_problems_depend_on_neither_seed_nor_number() -> None:
    """A longer list begins with the shorter one."""
    many = ChainSums(seed=1).held_out_problems(300)
    assert ChainSums(seed=2).held_out_problems(300) == many
    assert ChainSums(seed=2).held_out_problems(100) == many[:100]
    assert all(is_held_out(problem.text) for problem in many)


def test_only_short_held_out_prompts_repeat() -> None:
    counts = Counter(problem.text for problem in ChainSums().held_out_problems(512))
    repeated = {prompt for prompt, count in counts.items() if count > 1}
    assert all(len(prompt) <= len("a1b1c1:") for prompt in repeated)
    two_terms = {prompt for prompt in counts if len(prompt) == len("a1b1:")}
    assert len(two_terms) == sum(is_held_out(f"a{x}b{y}:") for x in range(1, 10) for y in range(1, 10))


# --- lengths and determinism ------------------------------------------------------------------------------------


def test_response_lengths_have_a_long_tail() -> None:
    environment = ChainSums()
    lengths = [len(solution(environment.problem(index))) for index in range(4000)]
    assert max(lengths) >= 4 * sum(lengths) / len(lengths)
    assert max(lengths) < 160  # the longest fits into the default sampling.max_tokens, end of sequence included


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True])
def test_the_number_of_terms_is_zipf_distributed(held_out: bool) -> None:
    environment, size = ChainSums(), 4000
    drawn = environment.held_out_problems(size) if held_out else [environment.problem(i) for i in range(size)]
    counts = Counter(map(num_terms, drawn))
    total = sum(n**-1.6 for n in range(2, 25))
    for n in (2, 3, 6, 12):
        expected = n**-1.6 / total
        assert abs(counts[n] / size - expected) < 5 * (expected / size) ** 0.5
    assert set(counts) == set(range(2, 25))


@given(st.integers(0, 50), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_problems_depend_on_seed_and_index_only(seed: int, indices: list[int]) -> None:
    environment = ChainSums(seed=seed)
    in_order = [environment.problem(index) for index in indices]
    assert [ChainSums(seed=seed).problem(index) for index in reversed(indices)] == in_order[::-1]


def test_problems_never_change_between_versions() -> None:
    """Resumed runs and published results rely on every index giving the same problem."""
    assert ChainSums(seed=0).problem(0).prompt == "a3b4c8d4:"


def test_seeds_and_indices_give_different_problems() -> None:
    first = [ChainSums(seed=0, min_terms=8).problem(index).prompt for index in range(100)]
    second = [ChainSums(seed=1, min_terms=8).problem(index).prompt for index in range(100)]
    assert len({*first, *second}) == 200


def test_numbers_of_terms_stay_in_the_given_range() -> None:
    environment = ChainSums(min_terms=5, max_terms=6)
    drawn = [environment.problem(index) for index in range(100)] + environment.held_out_problems(100)
    assert {num_terms(problem) for problem in drawn} == {5, 6}


@pytest.mark.parametrize(("low", "high"), [(1, 24), (5, 4), (2, 27)])
def test_wrong_numbers_of_terms_are_refused_with_advice(low: int, high: int) -> None:
    with pytest.raises(RecipeError, match="would work"):
        ChainSums(min_terms=low, max_terms=high)


# --- grades -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("response", ["a3,3b9,12c4,16=16", "=16", "a3,4=16", "=15=16"])
def test_right_final_answer_is_right(response: str) -> None:
    assert ChainSums().grade(EXAMPLE, response).reward == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "=",
        "16",
        "a3,3b9,12c4,16",
        "=17",
        "=1",
        "=160",
        "=016",
        "=16=",
        "=16 ",
        "=16<eos>",
        "=-16",
        "=\uff11\uff16",
        "=16.0",
    ],
)
def test_other_responses_are_wrong(response: str) -> None:
    assert ChainSums().grade(EXAMPLE, response).reward == 0.0


@given(problems, st.one_of(st.text(), st.text("0123456789abc,:=")))
def test_grade_never_raises(problem: Problem, response: str) -> None:
    reward = ChainSums().grade(problem, response).reward
    assert reward == (1.0 if response == f"={problem.answer}" or response.endswith(f"={problem.answer}") else 0.0)


@given(problems)
def test_solution_is_right_and_shows_steps(problem: Problem) -> None:
    grade = ChainSums().grade(problem, solution(problem))
    assert grade.reward == 1.0
    assert grade.components == {"accuracy": 1.0, "shows_steps": 1.0}
    assert ChainSums().grade(problem, f"={problem.answer}").components == {"accuracy": 1.0, "shows_steps": 0.0}


def test_chain_sums_implement_the_protocol() -> None:
    task: GradedTask = ChainSums()
    assert len(task.held_out_problems(3)) == 3


# --- demonstrations ---------------------------------------------------------------------------------------------


@given(problems, st.randoms(use_true_random=False))
def test_demonstration_without_flaws_is_the_solution(problem: Problem, rng: random.Random) -> None:
    assert demonstration(problem, rng, PERFECT) == solution(problem)


@given(problems, st.randoms(use_true_random=False))
def test_every_demonstration_ends_with_an_answer(problem: Problem, rng: random.Random) -> None:
    assert re.fullmatch(r"(?:[a-x][1-9],[1-9]\d*)*=[1-9]\d*", demonstration(problem, rng))


@given(problems, st.randoms(use_true_random=False))
def test_slip_is_wrong_and_carries_over(problem: Problem, rng: random.Random) -> None:
    response = demonstration(problem, rng, Flaws(blurt=0.0, slip=1.0, give_up=0.0))
    totals = [0, *map(int, re.findall(r",(\d+)", response))]
    numbers = map(int, problem.text[1::2])
    for before, number, after in zip(totals, numbers, totals[1:], strict=False):
        assert 1 <= abs(after - before - number) <= 2
    assert response.endswith(f",{totals[-1]}={totals[-1]}")


@given(problems, st.randoms(use_true_random=False))
def test_giving_up_leaves_out_steps(problem: Problem, rng: random.Random) -> None:
    response = demonstration(problem, rng, Flaws(blurt=0.0, slip=0.0, give_up=1.0))
    assert re.fullmatch(r"a[1-9],[1-9]=[1-9]\d*", response)
    assert solution(problem).startswith(response.partition("=")[0])


def test_demonstrations_have_flaws_at_the_given_rates() -> None:
    environment, rng = ChainSums(), random.Random(0)
    drawn = [environment.problem(index) for index in range(4000)]
    responses = [demonstration(problem, rng) for problem in drawn]
    blurted = sum(response.startswith("=") for response in responses) / len(drawn)
    right = sum(
        environment.grade(problem, response).reward for problem, response in zip(drawn, responses, strict=True)
    ) / len(drawn)
    assert 0.52 < blurted < 0.58
    assert 0.3 < right < 0.45
    unskilled = [demonstration(problem, rng, Flaws(blurt=1.0)) for problem in drawn]
    assert all(response.startswith("=") for response in unskilled)
