"""Comparison of runs: labels, the table and the plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import MissingExtraError, RunDirectoryError
from midflight.report.runs import plot_runs, run_table

PIPELINE = 'type = "pipeline"\nnum_in_flight = 64\n'
CONVENTIONAL = 'type = "conventional"\nsteps_per_rl_step = 4\n'
SUMMARY = {
    "eval_after": {"sampled_accuracy": 0.9125},
    "train_wall_s": 20.0,
    "steps": 100,
    "samples": 3200,
    "mean_lag": 2.5,
    "max_lag": 9,
    "mean_ess": 0.9987,
    "dropped": {"filtered": 0, "queue_full": 0},
    "length_bias": {"ks": 0.0125, "mean_generated": 19.0, "mean_trained": 18.5, "mean_dropped": None},
}


def make_run(directory: Path, schedule: str, num_steps: int = 30, **summary: Any) -> Path:
    directory.mkdir()
    (directory / "config.toml").write_text(f"[schedule]\n{schedule}")
    lines = [
        {"version": step, "wall_s": 0.2 * step, "samples": 32 * step, "reward/mean": step / num_steps}
        for step in range(1, num_steps + 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "summary.json").write_text(json.dumps(SUMMARY | summary))
    return directory


@pytest.fixture
def svg_with_text() -> Iterator[None]:
    """Draw SVG files with text elements instead of outlines, so that a test can read the text."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.rcParams["svg.fonttype"] = "none"
    yield
    matplotlib.rcdefaults()


def test_the_table_has_a_line_per_run(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", PIPELINE), make_run(tmp_path / "b", CONVENTIONAL, eval_after=None, mean_ess=None)]
    header, first, second = run_table(runs).splitlines()
    titles = ["run", "accuracy", "seconds", "steps", "samples/s", "mean lag", "max lag", "ESS", "dropped"]
    assert " ".join(header.split()) == " ".join(titles)
    assert first.startswith("pipeline, 64 in flight ")
    assert first.split()[-8:] == ["0.912", "20.0", "100", "160.0", "2.50", "9", "0.9987", "-"]
    assert second.startswith("conventional, G = 4 ")
    assert second.split()[-8:] == ["-", "20.0", "100", "160.0", "2.50", "9", "-", "-"]


@pytest.mark.parametrize(
    ("schedule", "label"),
    [
        (PIPELINE + "max_lag = 2\n", "pipeline, 64 in flight, max_lag = 2"),
        ('type = "april"\nover_sampling = 2.0\n', "april, over-sampling 2"),
        ('type = "april"\nover_sampling = 1.25\n', "april, over-sampling 1.25"),
        ('type = "bounded"\nmax_lag = 1\nupdates = "in_flight"\n', "bounded, max_lag = 1"),
        ('type = "bounded"\nmax_lag = 0\nupdates = "boundary"\n', "bounded, max_lag = 0, at the boundary"),
        ('type = "one_step_off"\n', "one_step_off"),
    ],
)
def test_labels_show_the_settings_of_the_schedule(tmp_path: Path, schedule: str, label: str) -> None:
    _, line = run_table([make_run(tmp_path / "a", schedule)]).splitlines()
    assert line.split("  ")[0] == label


def test_dropped_groups_are_shown_with_their_length(tmp_path: Path) -> None:
    dropped = {"filtered": 3, "queue_full": 9}
    bias = {"ks": 0.0625, "mean_generated": 19.0, "mean_trained": 17.0, "mean_dropped": 41.5}
    run = make_run(tmp_path / "a", PIPELINE, dropped=dropped, length_bias=bias)
    assert run_table([run]).endswith("  12 groups, mean length 41.5 of 19.0 generated, KS 0.062")


def test_lengths_dropped_after_the_last_step_are_unknown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", PIPELINE, dropped={"filtered": 3, "queue_full": 0})
    assert run_table([run]).endswith("0.9987  3 groups")


@pytest.mark.usefixtures("svg_with_text")
def test_the_plot_labels_runs_and_axes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", PIPELINE), make_run(tmp_path / "b", CONVENTIONAL)]
    plot_runs(runs, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    for label in ("pipeline, 64 in flight", "conventional, G = 4", "seconds of training", "samples trained", "reward"):
        assert f">{label}</text>" in text


@pytest.mark.usefixtures("svg_with_text")
def test_runs_with_the_same_schedule_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "seed-0", PIPELINE), make_run(tmp_path / "seed-1", PIPELINE)]
    plot_runs(runs, tmp_path / "plot.svg")
    for name in ("seed-0", "seed-1"):
        assert f"pipeline, 64 in flight ({name})" in (tmp_path / "plot.svg").read_text()
        assert f"pipeline, 64 in flight ({name})" in run_table(runs)


@pytest.mark.usefixtures("svg_with_text")
def test_runs_with_the_same_label_share_a_legend_entry(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, PIPELINE) for name in ("seed-0", "seed-1", "other")]
    plot_runs(runs, tmp_path / "plot.svg", ["mine", "mine", "yours"])
    text = (tmp_path / "plot.svg").read_text().lower()
    assert text.count(">mine</text>") == text.count(">yours</text>") == 1
    assert "seed-" not in text
    assert "#0072b2" in text
    assert "#d55e00" in text
    assert "#009e73" not in text


def test_the_plot_is_a_png_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_runs([make_run(tmp_path / "a", PIPELINE, num_steps=1)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_steps_without_a_reward_are_left_out_of_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path / "a", PIPELINE)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"version": 31, "wall_s": 6.2, "samples": 992, "reward/mean": null}\n')
    plot_runs([run], tmp_path / "plot.png")


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"midflight\[plot\]"):
        plot_runs([make_run(tmp_path / "a", PIPELINE)], tmp_path / "plot.png")


@pytest.mark.parametrize("missing", ["config.toml", "summary.json"])
def test_the_table_names_the_unfinished_run(tmp_path: Path, missing: str) -> None:
    run = make_run(tmp_path / "a", PIPELINE)
    (run / missing).unlink()
    with pytest.raises(RunDirectoryError, match=str(run)):
        run_table([run])


@pytest.mark.parametrize("content", [None, ""])
def test_a_run_without_steps_cannot_be_plotted(tmp_path: Path, content: str | None) -> None:
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path / "a", PIPELINE)
    (run / "metrics.jsonl").unlink()
    if content is not None:
        (run / "metrics.jsonl").write_text(content)
    with pytest.raises(RunDirectoryError, match="holds no metrics"):
        plot_runs([run], tmp_path / "plot.png")
