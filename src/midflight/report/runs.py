"""Comparison of runs: a table of their summaries, and plots of reward over seconds and over samples."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midflight.config.run_directory import RunDirectory
from midflight.errors import RunDirectoryError
from midflight.metrics.jsonl import MetricsLine, read_metrics
from midflight.report.plotting import COLORS, load_pyplot, save_figure, style_axis
from midflight.report.text_table import text_table

_SMOOTHED_OVER = 1 / 12  # window of the moving average, as a share of the run


def run_table(directories: Sequence[Path]) -> str:
    """Return a table with one line per run. Raises: RunDirectoryError if a directory holds no summary."""
    table = [["run", "accuracy", "seconds", "steps", "samples/s", "mean lag", "max lag", "ESS", "dropped"]]
    for directory, label in zip(directories, labels_of(directories), strict=True):
        summary = _summary(directory)
        after, ess, wall_s = summary["eval_after"], summary["mean_ess"], summary["train_wall_s"]
        accuracy = f"{after['sampled_accuracy']:.3f}" if after and after["sampled_accuracy"] is not None else "-"
        speed = [f"{wall_s:.1f}", summary["steps"], f"{summary['samples'] / max(wall_s, 1e-9):.1f}"]
        lag = [f"{summary['mean_lag']:.2f}", summary["max_lag"], f"{ess:.4f}" if ess else "-"]
        table.append([label, accuracy, *speed, *lag, _dropped(summary)])
    return text_table(table, left=(0, 8))


def plot_runs(directories: Sequence[Path], out: Path, labels: Sequence[str] | None = None) -> None:
    """Plot the reward of training batches over seconds and over samples, smoothed over a twelfth of each run.

    `labels` default to the runs' schedules; runs with the same label share a color.
    Raises: RunDirectoryError if a directory holds no metrics; MissingExtraError without matplotlib.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    colors: dict[str, str] = {}
    faint = min(0.12, 0.5 / len(directories))  # the points of many runs would hide the curves
    for directory, label in zip(directories, labels or labels_of(directories), strict=True):
        metrics = steps_of(directory)
        shown_label = "_" if label in colors else label  # matplotlib omits "_" from the legend
        color = colors.setdefault(label, COLORS[len(colors) % len(COLORS)])
        rewards = [line["reward/mean"] for line in metrics]
        for axis, key in zip(axes, ("wall_s", "samples"), strict=True):
            positions = [line[key] for line in metrics]
            axis.plot(positions, rewards, ".", color=color, alpha=faint, markersize=3)
            axis.plot(positions, smoothed(rewards), color=color, linewidth=2, label=shown_label)
    for axis, title in zip(axes, ("seconds of training", "samples trained"), strict=True):
        axis.set(xlabel=title, xlim=(0, None))
        style_axis(axis)
    axes[0].set_ylabel("reward")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    save_figure(figure, out)


def _summary(directory: Path) -> dict[str, Any]:
    path = RunDirectory(directory).summary
    if not path.is_file():
        raise RunDirectoryError(f"{directory} holds no {path.name}: no run has finished there")
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def _dropped(summary: dict[str, Any]) -> str:
    """Text with the number of dropped groups, their mean length and the length bias; "-" without dropped groups."""
    num_groups, bias = sum(summary["dropped"].values()), summary["length_bias"]
    if not num_groups:
        return "-"
    if bias["mean_dropped"] is None or bias["ks"] is None:  # all groups were dropped after the last step
        return f"{num_groups} groups"
    lengths = f"mean length {bias['mean_dropped']:.1f} of {bias['mean_generated']:.1f} generated"
    return f"{num_groups} groups, {lengths}, KS {bias['ks']:.3f}"


def steps_of(directory: Path) -> list[MetricsLine]:
    """Return the metrics lines with a reward. Raises: RunDirectoryError if there is none."""
    path = RunDirectory(directory).metrics
    lines = read_metrics(path) if path.is_file() else []
    steps = [line for line in lines if line["reward/mean"] is not None]
    if not steps:
        raise RunDirectoryError(f"{directory} holds no metrics yet")
    return steps


def labels_of(directories: Sequence[Path]) -> list[str]:
    """Return the label of each run: its schedule, and its directory if several runs have the same schedule."""
    labels = [_label(directory) for directory in directories]
    return [
        f"{label} ({directory.name})" if labels.count(label) > 1 else label
        for label, directory in zip(labels, directories, strict=True)
    ]


def _label(directory: Path) -> str:
    """Return the schedule's name and its main settings."""
    path = RunDirectory(directory).config
    if not path.is_file():
        raise RunDirectoryError(f"{directory} holds no run: there is no {path.name} in it")
    schedule = tomllib.loads(path.read_text())["schedule"]
    bound = f", max_lag = {schedule['max_lag']}" if "max_lag" in schedule else ""
    match schedule["type"]:
        case "conventional":
            return f"conventional, G = {schedule['steps_per_rl_step']}"
        case "april":
            return f"april, over-sampling {schedule['over_sampling']:g}"
        case "bounded":
            return f"bounded{bound}{', at the boundary' if schedule['updates'] == 'boundary' else ''}"
        case "pipeline":
            return f"pipeline, {schedule['num_in_flight']} in flight{bound}"
        case other:
            return str(other)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the centered moving average; the window shrinks at both ends."""
    reach = max(1, round(len(values) * _SMOOTHED_OVER / 2))
    windows = [values[max(0, index - reach) : index + reach + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]
