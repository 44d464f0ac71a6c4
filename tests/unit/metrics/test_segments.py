"""Buckets of lags and tenths of responses match hand-computed values."""

from __future__ import annotations

import numpy as np
import pytest

from midflight.metrics.segments import LAG_EDGES, LAG_LABELS, lag_buckets, tenths


def test_bucket_spans_from_its_edge_to_the_next() -> None:
    lags = np.array([0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 65, 10_000])
    assert lag_buckets(lags).tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7]
    assert [int(label.split("-")[0].rstrip("+")) for label in LAG_LABELS] == list(LAG_EDGES)


def test_token_newer_than_the_trainer_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="newer"):
        lag_buckets(np.array([0, -1]))


def test_tenths_are_relative_to_each_response() -> None:
    assert tenths(np.array([10, 0, 3, 1, 20], np.int32)).tolist() == [
        *range(10),
        *(0, 3, 6),
        0,
        *(tenth for tenth in range(10) for _ in range(2)),
    ]
    assert tenths(np.zeros(0, np.int32)).tolist() == []
