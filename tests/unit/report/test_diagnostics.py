"""The plot of off-policy diagnostics: its labels, and runs with missing metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import RunDirectoryError
from midflight.report.diagnostics import plot_diagnostics

MISMATCH: dict[str, Any] = {"mismatch/mean": 1e-7, "mismatch/max": 1e-6, "mismatch/tokens": 9.0}


def make_run(directory: Path, num_steps: int = 5, **others: Any) -> Path:
    """Write a run with lags up to 3 and no token in the last tenth of responses."""
    directory.mkdir()
    (directory / "config.toml").write_text('[schedule]\ntype = "conventional"\nsteps_per_rl_step = 4\n')
    line = {
        "reward/mean": 0.5,
        "ess/by_lag": [1.0, 0.99, 0.98, *[None] * 5],
        "kl/behavior/by_lag": [0.0, 0.01, 0.02, *[None] * 5],
        "kl/behavior/by_position": [0.01] * 9 + [None],
        "lag/tokens_by_lag": [5, 5, 5, 0, 0, 0, 0, 0],
        **others,
    }
    steps = [{"version": step, **line} for step in range(1, num_steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return directory


@pytest.fixture(autouse=True)
def svg_with_text() -> Iterator[None]:
    """Draw SVG files with text elements instead of outlines, so that a test can read the text."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.rcParams["svg.fonttype"] = "none"
    yield
    matplotlib.rcdefaults()


def test_the_plot_labels_runs_axes_and_filled_buckets(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, **MISMATCH) for name in ("a", "b")]
    plot_diagnostics(runs, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    for label in (
        *("conventional, G = 4 (a)", "conventional, G = 4 (b)", "largest of a step", "mean, smoothed"),
        *("effective sample size / tokens", "KL(sampler || trainer) / nats per token"),
        *("token lag / optimizer steps", "position in the response / % of its tokens", "training / optimizer steps"),
        *("|trainer - engine| log-probability / nats", "0", "1", "2-3"),
    ):
        assert f">{label}</text>" in text, label
    assert "64+" not in text


def test_a_plot_without_mismatch_says_why(tmp_path: Path) -> None:
    plot_diagnostics([make_run(tmp_path / "a")], tmp_path / "plot.svg")
    assert "no sequence was sampled and trained on" in (tmp_path / "plot.svg").read_text()


def test_steps_with_nan_mismatch_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", **MISMATCH)
    broken = {**json.loads((run / "metrics.jsonl").read_text().splitlines()[0]), "version": 6}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**broken, "mismatch/max": None}) + "\n")
        file.write(json.dumps({**broken, "version": 7, "mismatch/mean": None}) + "\n")
    plot_diagnostics([run], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("num_steps", [1, 2])
def test_short_runs_are_drawn(tmp_path: Path, num_steps: int) -> None:
    plot_diagnostics([make_run(tmp_path / "a", num_steps, **MISMATCH)], tmp_path / "plot.png")


def test_a_run_without_these_metrics_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / "metrics.jsonl").write_text('{"version": 1, "reward/mean": 0.5}\n')
    with pytest.raises(RunDirectoryError, match=f"{run} holds no metrics by lag"):
        plot_diagnostics([run], tmp_path / "plot.png")
