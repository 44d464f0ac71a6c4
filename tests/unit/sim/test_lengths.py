"""Length distributions: moments and survival for the formulas, and draws that follow them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.errors import ScenarioError
from midflight.sim.lengths import (
    CycledLengths,
    GroupedLogNormal,
    LengthDistribution,
    constant,
    from_counts,
    lognormal,
    two_point,
    uniform,
)

distributions = st.one_of(
    st.integers(1, 300).map(uniform),
    st.integers(1, 300).map(constant),
    st.builds(two_point, st.integers(1, 300), st.integers(1, 300), st.floats(0, 1)),
    st.builds(lognormal, st.floats(0.5, 500), st.floats(0.05, 2), st.integers(1, 300)),
    st.dictionaries(st.integers(1, 300), st.floats(0.1, 10), min_size=1, max_size=9).map(
        lambda counts: from_counts([*counts], [*counts.values()])
    ),
)


@given(distributions)
def test_survival_sums_up_to_the_mean(lengths: LengthDistribution) -> None:
    assert lengths.probabilities.sum() == pytest.approx(1)
    assert lengths.survival.sum() == pytest.approx(lengths.mean)
    assert lengths.survival[0] == pytest.approx(1)
    assert (np.diff(lengths.survival) <= 0).all()
    assert lengths.survival[-1] == pytest.approx(lengths.probabilities[-1])


@given(distributions)
def test_moments_are_consistent(lengths: LengthDistribution) -> None:
    assert 1 <= lengths.mean <= lengths.max + 1e-9
    assert lengths.second_moment >= lengths.mean**2 * (1 - 1e-12)
    assert lengths.second_moment <= lengths.mean * lengths.max * (1 + 1e-12)


@given(distributions, st.integers(0, 2**32))
def test_draws_have_the_mean(lengths: LengthDistribution, seed: int) -> None:
    drawn = lengths.draw(np.random.default_rng(seed), 0, 40, 50)
    assert drawn.shape == (40, 50)
    assert drawn.min() >= 1
    assert drawn.max() <= lengths.max
    deviation = math.sqrt(max(0.0, lengths.second_moment - lengths.mean**2))
    # Five standard errors, plus one token for tails so thin that most draws miss them.
    assert drawn.mean() == pytest.approx(lengths.mean, abs=5 * deviation / math.sqrt(drawn.size) + 1)


def test_uniform() -> None:
    lengths = uniform(8192)
    assert lengths.mean == pytest.approx(4096.5)
    assert lengths.second_moment == pytest.approx((8192 + 1) * (2 * 8192 + 1) / 6)


def test_two_point_with_equal_lengths() -> None:
    assert two_point(7, 7, 0.3).mean == pytest.approx(7)


def test_lognormal_keeps_its_median_and_is_truncated() -> None:
    lengths = lognormal(100, 0.5, 400)
    assert lengths.survival[100] == pytest.approx(0.5)  # P(length >= 101)
    assert lengths.survival[-1] == pytest.approx(0.5 * math.erfc(math.log(399 / 100) / 0.5 / math.sqrt(2)))


def test_siblings_have_similar_lengths() -> None:
    lengths = GroupedLogNormal(4000, 0.8, 0.3, 16384)
    drawn = lengths.draw(np.random.default_rng(0), 0, 4000, 8)
    assert drawn.std() == pytest.approx(4194, rel=0.02)
    assert drawn.std(axis=1).mean() == pytest.approx(1264, rel=0.03)
    assert drawn.mean() == pytest.approx(lengths.distribution.mean, rel=0.02)
    assert (drawn == 16384).mean() == pytest.approx(lengths.distribution.probabilities[-1], rel=0.1)


def test_cycled_lengths_continue_across_groups() -> None:
    lengths = CycledLengths([5, 6, 7])
    assert lengths.draw(np.random.default_rng(0), 0, 2, 2).tolist() == [[5, 6], [7, 5]]
    assert lengths.draw(np.random.default_rng(0), 2, 1, 2).tolist() == [[6, 7]]
    assert lengths.distribution.mean == pytest.approx(6)


def test_independent_lengths_ignore_the_group() -> None:
    lengths = uniform(50)
    first, later = (lengths.draw(np.random.default_rng(1), group, 3, 4) for group in (0, 7))
    assert np.array_equal(first, later)


def test_counts_of_zero_are_refused() -> None:
    assert from_counts([3, 5, 3], [1, 0, 2]).probabilities.tolist() == [0, 0, 1]
    with pytest.raises(ScenarioError, match=r"counts: no length has a count above 0"):
        from_counts([3], [0])
    with pytest.raises(ScenarioError, match=r"counts: no length has a count above 0"):
        from_counts([])
