"""Lag metrics match hand-computed values, and sorted tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.metrics.lag import lag_metrics, lag_percentile, merge_histograms, old_token_fraction

histograms = st.dictionaries(st.integers(0, 30), st.integers(0, 50), max_size=8)


def test_lag_metrics_match_hand_computed_values() -> None:
    """Ten tokens have lag 0, nine have lag 1 and one has lag 7; the 19th of the 20 by age has lag 1."""
    assert lag_metrics({7: 1, 0: 10, 1: 9}) == {
        "lag/mean": pytest.approx(16 / 20),
        "lag/max": 7.0,
        "lag/p95": 1.0,
        "old_token_fraction": pytest.approx(0.5),
    }


def test_p95_changes_if_more_than_five_percent_are_older() -> None:
    assert lag_percentile({0: 95, 9: 5}, 95) == 0
    assert lag_percentile({0: 94, 9: 6}, 95) == 9


def test_maximum_ignores_lags_without_tokens() -> None:
    assert lag_metrics({0: 3, 5: 0})["lag/max"] == 0


def test_no_tokens_give_no_metrics() -> None:
    assert lag_metrics({}) == {}
    assert lag_metrics({3: 0}) == {}
    with pytest.raises(ValueError, match="no tokens"):
        lag_percentile({}, 95)
    with pytest.raises(ValueError, match="no tokens"):
        old_token_fraction({})


def test_token_newer_than_the_trainer_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="newer"):
        lag_metrics({-1: 2, 0: 5})


@given(histograms)
def test_percentiles_match_sorted_tokens(histogram: dict[int, int]) -> None:
    lags = sorted(lag for lag, count in histogram.items() for _ in range(count))
    for percent in (1, 50, 95, 100):
        if lags:
            rank = -(-percent * len(lags) // 100)
            assert lag_percentile(histogram, percent) == lags[rank - 1]


@given(st.lists(histograms, max_size=4))
def test_merged_histogram_has_every_token(parts: list[dict[int, int]]) -> None:
    merged = merge_histograms(parts)
    assert list(merged) == sorted(merged)
    for lag in range(31):
        assert merged.get(lag, 0) == sum(part.get(lag, 0) for part in parts)
