"""evaluations.jsonl: order, resumed runs, the best version, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midflight.metrics.evaluations import (
    append_evaluation,
    best_version,
    forget_later,
    metrics_of,
    read_evaluations,
    score_of,
)


def line(value: float | None, **fields: Any) -> dict[str, Any]:
    estimate = None if value is None else {"value": value, "standard_error": 0.25}
    result = {"samples": 2, "avg": estimate, "maj": None, "pass_at": {"1": estimate}, "mean_length": 9.0}
    return {"sets": {"sums": {**result, "truncated_fraction": 0.5}, "other": {"avg": {"value": 9.0}}}, **fields}


def versions(path: Path) -> list[int]:
    return [item["version"] for item in read_evaluations(path)]


def test_no_file_means_no_evaluations(tmp_path: Path) -> None:
    assert read_evaluations(tmp_path / "evaluations.jsonl") == []


def test_a_version_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    for version, value in ((0, 0.1), (10, 0.2), (20, 0.3), (20, 0.4)):
        append_evaluation(path, version, line(value))
    assert versions(path) == [0, 10, 20]
    assert score_of(read_evaluations(path)[-1]) == 0.4


def test_versions_that_are_made_again_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    for version in (0, 10, 20):
        append_evaluation(path, version, line(0.5))
    with path.open("a") as file:
        file.write('{"version": 30, "se')  # killed while writing
    forget_later(path, 15)
    assert versions(path) == [0, 10]
    append_evaluation(path, 20, line(0.5))
    assert versions(path) == [0, 10, 20]


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ({0: 0.9, 10: 0.2, 20: 0.4, 30: 0.3}, 20),
        ({10: 0.4, 20: 0.4}, 20),
        ({0: 0.9}, None),
        ({10: None}, None),
        ({}, None),
    ],
)
def test_the_best_version_has_the_highest_average(values: dict[int, float | None], best: int | None) -> None:
    assert best_version([line(value, version=version) for version, value in values.items()]) == best


def test_metrics_name_set_figure_and_error() -> None:
    evaluation = line(0.75)
    del evaluation["sets"]["other"]
    assert metrics_of(evaluation) == {
        "eval/sums/avg@2": 0.75,
        "eval/sums/avg@2_error": 0.25,
        "eval/sums/pass@1": 0.75,
        "eval/sums/pass@1_error": 0.25,
        "eval/sums/mean_length": 9.0,
        "eval/sums/truncated_fraction": 0.5,
    }
