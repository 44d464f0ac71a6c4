"""Learning rates match hand-computed values."""

from __future__ import annotations

import pytest

from midflight.trainer.learning_rates import LearningRates


def test_constant_rate_never_changes() -> None:
    assert {LearningRates(3e-4, num_steps=10)(step) for step in (0, 5, 10, 99)} == {3e-4}


def test_warm_up_rises_in_equal_steps_from_above_zero() -> None:
    rates = LearningRates(1.0, num_warmup_steps=3, num_steps=10)
    assert [rates(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("linear", [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]), ("cosine", [1.0, 0.8828427, 0.6, 0.3171573, 0.2, 0.2])],
)
def test_rate_falls_to_its_final_value_and_stays(shape: str, expected: list[float]) -> None:
    rates = LearningRates(1.0, shape, num_warmup_steps=2, num_steps=10, final=0.2)
    assert [rates(step) for step in (2, 4, 6, 8, 10, 99)] == pytest.approx(expected)


def test_run_of_warm_up_only() -> None:
    rates = LearningRates(1.0, "linear", num_warmup_steps=4, num_steps=4)
    assert [rates(step) for step in (0, 3, 4, 5)] == pytest.approx([0.2, 0.8, 1.0, 0.0])
