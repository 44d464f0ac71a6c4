"""The reward `math`: final answers in LaTeX and plain text, compared as mathematics."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from midflight.envs.rewards.math import Math
from midflight.errors import RecipeError
from midflight.types import Grade, Problem


def reward(answer: str, response: str, **options: bool | int) -> float:
    return Math(**options)(Problem("0", "?", answer=answer), response).reward  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("72", "She sold 48 + 24 = 72."),
        ("72", r"\boxed{72}"),
        ("$72$", "the final answer is $72$"),
        (r"\boxed{72}", "72.0"),
        (r"\frac{1}{2}", r"\boxed{0.5}"),
        (r"$\frac{1}{2}$", "so it is 1/2"),
        ("x+1", r"\boxed{1 + x}"),
        ("x^2", r"\boxed{x \cdot x}"),
        (r"\{1,2\}", r"\boxed{\{2, 1\}}"),
        ("1,234", r"\boxed{1234}"),
    ],
)
def test_equal_answers_are_right(answer: str, response: str) -> None:
    assert reward(answer, response) == 1.0


@pytest.mark.parametrize(
    ("answer", "response"),
    [("72", "71"), ("x+1", r"\boxed{1}"), (r"\frac{1}{2}", r"\boxed{2}"), ("72", "no idea"), ("72", "")],
)
def test_other_answers_are_wrong(answer: str, response: str) -> None:
    assert reward(answer, response) == 0.0


def test_boxed_answer_counts_before_later_numbers() -> None:
    assert reward("5", r"\boxed{5} as 2 + 3 = 5, not 6") == 1.0
    assert reward("6", r"\boxed{5} as 2 + 3 = 5, not 6") == 0.0


def test_with_boxed_nothing_else_counts() -> None:
    assert reward("5", "it is 5", boxed=True) == 0.0
    assert reward("5", r"it is \boxed{5}", boxed=True) == 1.0


def test_precision_is_in_decimal_places() -> None:
    assert reward("0.3333", "1/3") == 0.0
    assert reward("0.3333", "1/3", precision=3) == 1.0


def test_answer_is_the_extracted_text() -> None:
    assert Math()(Problem("0", "?", answer="5"), r"hm, \boxed{5}") == Grade(1.0, answer="5")
    assert Math()(Problem("0", "?", answer="5"), "hm").answer is None


def test_right_answer_that_is_no_expression_is_an_error() -> None:
    with pytest.raises(ValueError, match="the right answer '' is not a mathematical expression"):
        reward("", r"\boxed{5}")


def test_threads_can_grade() -> None:
    rewards: list[float] = []
    thread = threading.Thread(target=lambda: rewards.append(reward("5", r"\boxed{5}")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


def test_negative_precision_is_refused() -> None:
    with pytest.raises(RecipeError, match="precision = -1 is negative"):
        Math(precision=-1)


@pytest.fixture
def no_gc_callbacks() -> Iterator[None]:
    """Remove Hypothesis's callback of the garbage collector: an alarm that rings in it would be swallowed."""
    callbacks = gc.callbacks.copy()
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


@pytest.mark.slow
@pytest.mark.usefixtures("no_gc_callbacks")
@pytest.mark.parametrize(
    "expression", ["9^{9^{9^{9}}}", r"\sum_{k=1}^{10^9} \frac{1}{k}", "{" * 2000 + "5" + "}" * 2000]
)
def test_expression_that_takes_too_long_is_wrong(expression: str) -> None:
    """The reward is 0 long before `task.grading_timeout_s`, so the rest of the group is not lost."""
    assert reward("5", rf"\boxed{{{expression}}}") == 0.0
