"""Duration of a decode step: tables, padding, interpolation and extrapolation, affine costs."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.errors import ScenarioError
from midflight.sim.costs import PAPER_STEP_COST, AffineCost, RateTable, StepCost, rates


@st.composite
def tables(draw: st.DrawFn) -> RateTable:
    """Draw tables whose rates increase by no more than their sizes."""
    sizes = sorted(draw(st.sets(st.integers(1, 500), min_size=1, max_size=6)))
    rate = draw(st.floats(0.01, 10))
    growth = [draw(st.floats(1, larger / size)) for size, larger in pairwise(sizes)]
    rising = accumulate([rate, *growth], lambda rate, factor: rate * factor)
    return RateTable(tuple(sizes), tuple(rising), draw(st.sampled_from([1, 8, 64])), beyond="hold")


def test_step_costs_as_much_as_next_padded_size() -> None:
    times = PAPER_STEP_COST.step_times([0, 0.5, 1, 64, 64.5, 65, 128, 1024, 2048])
    at_64, at_128, at_1024 = 64 / 0.1402, 128 / 0.2716, 1024 / 0.6067
    assert times == pytest.approx([0, at_64, at_64, at_64, at_128, at_128, at_128, at_1024, 2 * at_1024])
    assert rates(PAPER_STEP_COST, [0, 32, 192]) == pytest.approx([0, 0.1402 / 2, 0.3842])


def test_times_between_sizes_are_interpolated() -> None:
    table = RateTable((10, 20), (1.0, 1.25))
    assert table.step_times([1, 10, 12.5, 20]) == pytest.approx([10, 10, 11.5, 16])
    assert table.max_in_flight == 20
    with pytest.raises(ScenarioError, match=r"num_in_flight = 21 is beyond the table, whose sizes end at 20"):
        table.step_times([5, 21])


@given(tables())
def test_step_times_never_decrease_with_load(table: RateTable) -> None:
    assert (np.diff(table.step_times(np.arange(0, 1500, 0.5))) >= -1e-9).all()


@given(tables())
def test_table_keeps_its_rates_at_padded_sizes(table: RateTable) -> None:
    for size, rate in zip(table.sizes, table.rates, strict=True):
        if size % table.pad_to == 0:
            assert float(rates(table, size)) == pytest.approx(rate)


def test_affine_cost() -> None:
    cost = AffineCost(base=2.0, per_sequence=0.25, per_token=0.01)
    assert cost.step_times([0, 1, 8]) == pytest.approx([0, 2.25, 4])
    assert (cost.per_token, cost.max_in_flight) == (0.01, math.inf)


@pytest.mark.parametrize("cost", [PAPER_STEP_COST, AffineCost(1.0, 0.1), RateTable((4,), (1.0,))])
def test_idle_engine_takes_no_time(cost: StepCost) -> None:
    assert cost.step_times(0) == rates(cost, 0) == 0


@pytest.mark.parametrize(
    ("sizes", "its_rates", "message"),
    [
        ((), (), "sizes: the table is empty"),
        ((1, 2), (1.0,), "rates: got 1 for 2 sizes"),
        ((0, 2), (1.0, 2.0), "sizes: should be at least 1, got 0"),
        ((1, 2), (1.0, 0.0), "rates: should be greater than 0 and finite"),
        ((1, 2), (1.0, math.nan), "rates: should be greater than 0 and finite"),
        ((4, 4), (1.0, 1.0), "sizes: should increase, but 4 comes after 4"),
        ((1, 2), (1.0, 0.9), "rates: should not decrease, but 1 sequences have 1 and 2 have 0.9"),
        ((1, 2), (1.0, 2.5), "rates: a step with 2 sequences would be shorter (0.8) than one with 1 (1)"),
    ],
)
def test_invalid_table_is_refused(sizes: tuple[int, ...], its_rates: tuple[float, ...], message: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        RateTable(sizes, its_rates)
    assert message in str(raised.value)


def test_affine_cost_of_zero_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"base and per_sequence are both 0"):
        AffineCost(0.0)
