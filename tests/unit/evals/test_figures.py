"""avg@k, pass@k and maj@k against enumerations and closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from midflight.evals.figures import estimate, figures, majority_correctness, numbers_of_attempts, pass_at_k


@pytest.mark.parametrize("num_samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(num_samples: int) -> None:
    for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        responses = [True] * num_correct + [False] * (num_samples - num_correct)
        subsets = list(itertools.combinations(responses, k))
        expected = sum(map(any, subsets)) / len(subsets)
        assert pass_at_k(np.array([num_correct]), num_samples, k)[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.93, 1.0])
def test_pass_at_k_is_unbiased_for_independent_responses(p: float) -> None:
    num_samples = 9
    counts = np.arange(num_samples + 1)
    probabilities = [math.comb(num_samples, c) * p**c * (1 - p) ** (num_samples - c) for c in counts]
    for k in range(1, num_samples + 1):
        expectation = np.dot(probabilities, pass_at_k(counts, num_samples, k))
        assert expectation == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_stays_finite_for_very_many_samples() -> None:
    values = pass_at_k(np.array([0, 1, 5000, 10_000]), 10_000, 5000)
    np.testing.assert_allclose(values, [0.0, 0.5, 1.0, 1.0], atol=1e-9)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_refuses_more_attempts_than_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"k = {k} is not between 1 and the 3 samples"):
        pass_at_k(np.array([1]), 3, k)


def test_expected_majority_has_its_closed_form() -> None:
    """Three independent responses, right with probability p, else one of two wrong answers."""
    p, wrong = 0.6, 0.2
    chances = {"right": p, "x": wrong, "y": wrong}
    expectation = 0.0
    for answers in itertools.product(chances, repeat=3):
        correct = np.array([[answer == "right" for answer in answers]])
        expectation += math.prod(chances[answer] for answer in answers) * majority_correctness([answers], correct)[0]
    two_or_three_right = p**3 + 3 * p**2 * (1 - p)
    all_different = 6 * p * wrong * wrong
    assert expectation == pytest.approx(two_or_three_right + all_different / 3, abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["5", "5", "4"], [False, False, True], 0.0),
        (["4", "5"], [True, False], 0.5),
        (["4", "5", "6"], [True, False, False], 1 / 3),
        ([None, None, "4"], [False, False, True], 0.0),
        ([None, "4"], [False, True], 0.5),
        (["4", "4"], [True, False], 0.5),
    ],
)
def test_majority_of_one_problem(answers: list[str | None], correct: list[bool], expected: float) -> None:
    assert majority_correctness([answers], np.array([correct]))[0] == pytest.approx(expected)


def test_standard_error_is_over_problems() -> None:
    rewards = np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    means = rewards.mean(axis=1)
    result = estimate(means)
    assert result.value == 0.5
    assert result.standard_error == pytest.approx(math.sqrt(((means - 0.5) ** 2).sum() / 3 / 4))


def test_agreeing_samples_do_not_lower_the_error() -> None:
    one = np.array([[1.0], [0.0], [1.0], [1.0]])
    many = np.repeat(one, 16, axis=1)
    no_answers = [[None]] * 4
    single, repeated = figures(one, one > 0, no_answers), figures(many, many > 0, [[None] * 16] * 4)
    assert single
    assert repeated
    assert repeated.avg == single.avg


def test_error_covers_the_truth_for_independent_problems() -> None:
    """The mean of squared standard errors equals the variance of avg@k over repeated evaluations."""
    rng = np.random.default_rng(0)
    tables = (rng.random((4000, 25, 4)) < rng.beta(2, 2, (4000, 25, 1))).astype(float)
    results = [estimate(table.mean(axis=1)) for table in tables]
    variance = np.var([result.value for result in results])
    errors = [result.standard_error for result in results if result.standard_error is not None]
    assert np.mean(np.square(errors)) == pytest.approx(variance, rel=0.1)


def test_figures_of_a_table() -> None:
    rewards = np.array([[1.0, 0.5, 0.0], [0.0, 0.0, 0.0]])
    result = figures(rewards, rewards >= 1, [["4", "5", "4"], ["7", "7", None]])
    assert result
    assert result.maj
    assert (result.num_problems, result.avg.value, result.maj.value) == (2, 0.25, 0.25)
    assert {k: value.value for k, value in result.pass_at.items()} == pytest.approx({"1": 1 / 6, "2": 1 / 3, "3": 0.5})


def test_no_majority_without_extracted_answers() -> None:
    result = figures(np.ones((1, 2)), np.ones((1, 2), bool), [[None, None]])
    assert result
    assert (result.maj, result.avg.standard_error) == (None, None)


def test_no_figures_without_problems() -> None:
    assert figures(np.zeros((0, 4)), np.zeros((0, 4), bool), []) is None


def test_numbers_of_attempts_end_with_all_samples() -> None:
    assert {n: numbers_of_attempts(n) for n in (1, 2, 6, 64)} == {
        1: [1],
        2: [1, 2],
        6: [1, 2, 4, 6],
        64: [1, 2, 4, 8, 16, 32, 64],
    }
