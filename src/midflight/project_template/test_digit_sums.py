"""Rewards, reproducibility and held-out problems of the task."""

from digit_sums import DigitSums


def test_only_the_right_sum_is_rewarded() -> None:
    task = DigitSums()
    problem = task.problem(0)
    assert task.grade(problem, f"a1,1={problem.answer}").reward == 1
    assert task.grade(problem, f"={int(problem.answer) + 1}").reward == 0
    assert task.grade(problem, f"{problem.answer}=").reward == 0
    assert task.grade(problem, "").reward == 0


def test_a_problem_depends_on_seed_and_index_alone() -> None:
    assert DigitSums(seed=1).problem(5) == DigitSums(seed=1).problem(5)
    assert DigitSums(seed=1).problem(5) != DigitSums(seed=2).problem(5)


def test_no_held_out_problem_is_trained_on() -> None:
    task = DigitSums()
    held_out = {problem.prompt for problem in task.held_out_problems(512)}
    assert held_out.isdisjoint(task.problem(index).prompt for index in range(2000))
