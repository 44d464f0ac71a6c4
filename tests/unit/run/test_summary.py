"""Figures of the summary from metrics lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.metrics.averages import mean_by_lag, mismatch_of
from midflight.metrics.segments import LAG_EDGES
from midflight.run import summary
from midflight.run.directory import create_run

LINES: list[dict[str, Any]] = [
    {"ess/by_lag": [0.5, None, *[None] * 6], "lag/tokens_by_lag": [30, 0, *[0] * 6]},
    {},  # a batch without any gradient
    {"ess/by_lag": [1.0, 0.25, *[None] * 6], "lag/tokens_by_lag": [10, 7, *[0] * 6]},
]


def test_means_by_lag_are_weighted_by_tokens() -> None:
    assert mean_by_lag(LINES, "ess") == [pytest.approx(25 / 40), 0.25, *[None] * 6]
    assert mean_by_lag([], "ess") == [None] * 8


def test_mismatch_ignores_steps_without_one() -> None:
    lines: list[dict[str, Any]] = [
        {"mismatch/mean": 1e-6, "mismatch/max": 3e-6, "mismatch/tokens": 30.0},
        {},
        {"mismatch/mean": 5e-6, "mismatch/max": 2e-5, "mismatch/tokens": 10.0},
    ]
    assert mismatch_of(lines) == {"mean": pytest.approx(2e-6), "max": 2e-5}
    assert mismatch_of([{}]) == {"mean": None, "max": None}


def test_a_nan_mismatch_makes_the_maximum_unknown() -> None:
    lines: list[dict[str, Any]] = [
        {"mismatch/mean": None, "mismatch/max": None, "mismatch/tokens": 4.0},
        {"mismatch/mean": 1e-6, "mismatch/max": 1e-5, "mismatch/tokens": 4.0},
    ]
    assert mismatch_of(lines) == {"mean": 1e-6, "max": None}


class Recorded(dict[str, Any]):
    """A metrics line that has every key, and records which keys are read."""

    read: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> Any:
        self.read.add(key)
        return [1.0] * len(LAG_EDGES) if key.endswith("by_lag") else 1.0


def test_every_metric_that_a_summary_reads_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(SHIPPED_RECIPES["cpu_demo"], [f"run.directory={tmp_path / 'run'}"])
    monkeypatch.setattr(summary, "_metrics", lambda *_: [Recorded()])
    summary.summarize(create_run(recipe), recipe, None, None)
    assert set(summary._SUMMARIZED) == Recorded.read
