"""Plot of off-policy diagnostics of runs: by lag, by position in the response, and for tokens without lag."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from midflight.errors import RunDirectoryError
from midflight.metrics.averages import mean_by_lag
from midflight.metrics.jsonl import MetricsLine
from midflight.metrics.segments import LAG_EDGES, LAG_LABELS, NUM_POSITIONS
from midflight.report.plotting import COLORS, load_pyplot, save_figure, style_axis
from midflight.report.runs import labels_of, smoothed, steps_of

_MIDDLES = [100 * (index + 0.5) / NUM_POSITIONS for index in range(NUM_POSITIONS)]  # centers of the tenths (%)


def plot_diagnostics(directories: Sequence[Path], out: Path) -> None:
    """Plot ESS by lag, KL by lag, KL by position, and the mismatch of trainer and engine over the run.

    Values are means over the run's steps; values by lag are weighted by tokens.
    Raises: RunDirectoryError if a directory holds no such metrics; MissingExtraError without matplotlib.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    (ess, kl_by_lag), (kl_by_position, mismatch) = axes
    for number, (directory, label) in enumerate(zip(directories, labels_of(directories), strict=True)):
        steps, style = _measured(directory), {"color": COLORS[number % len(COLORS)], "label": label}
        _draw(ess, range(len(LAG_EDGES)), mean_by_lag(steps, "ess"), style)
        _draw(kl_by_lag, range(len(LAG_EDGES)), mean_by_lag(steps, "kl/behavior"), style)
        _draw(kl_by_position, _MIDDLES, _by_position(steps), style)
        _draw_mismatch(mismatch, steps, style)
    for axis in (ess, kl_by_lag):
        axis.set_xticks(range(len(LAG_EDGES)), LAG_LABELS)
        last = max(_last_known(line) for line in axis.lines)
        axis.set(xlabel="token lag / optimizer steps", xlim=(-0.4, last + 0.4))
    for axis in (kl_by_lag, kl_by_position):
        axis.set_ylabel("KL(sampler || trainer) / nats per token")
    ess.set_ylabel("effective sample size / tokens")
    kl_by_position.set(xlabel="position in the response / % of its tokens", xlim=(0, 100))
    difference = "|trainer - engine| log-probability / nats"
    mismatch.set(xlabel="training / optimizer steps", xlim=(0, None), ylabel=difference)
    _explain_mismatch(mismatch)
    ess.ticklabel_format(axis="y", useOffset=False)
    for axis in axes.flat:
        style_axis(axis)
    figure.legend(*kl_by_position.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    save_figure(figure, out)


def _measured(directory: Path) -> list[MetricsLine]:
    steps = [line for line in steps_of(directory) if "kl/behavior/by_position" in line]
    if not steps:
        raise RunDirectoryError(f"{directory} holds no metrics by lag and position")
    return steps


def _by_position(steps: Sequence[MetricsLine]) -> list[float | None]:
    """Mean over steps of the KL in each tenth of the response; None for a tenth without tokens."""
    columns = zip(*(line["kl/behavior/by_position"] for line in steps), strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    return [sum(values) / len(values) if values else None for values in known]


def _draw(axis: Any, positions: Sequence[float], values: Sequence[float | None], style: dict[str, Any]) -> None:
    axis.plot(positions, np.array(values, np.float64), "o-", markersize=5, linewidth=2, **style)


def _last_known(line: Any) -> float:
    """Return the last position of a drawn line that has a value; 0 if there is none."""
    return max((x for x, y in zip(*line.get_data(), strict=True) if not math.isnan(y)), default=0)


def _draw_mismatch(axis: Any, steps: Sequence[MetricsLine], style: dict[str, Any]) -> None:
    compared = [line for line in steps if line.get("mismatch/mean") is not None]
    if not compared:
        return
    versions = [line["version"] for line in compared]
    largest = np.array([line["mismatch/max"] for line in compared], np.float64)  # None becomes NaN
    axis.plot(versions, largest, ".", alpha=0.5, markersize=4, **style)
    mean_style = "-" if len(versions) > 1 else "o"  # a line of one point is invisible
    axis.plot(versions, smoothed([line["mismatch/mean"] for line in compared]), mean_style, linewidth=2, **style)


def _explain_mismatch(axis: Any) -> None:
    if not axis.lines:
        reason = "no sequence was sampled and trained on\nby one version of the weights"
        axis.text(0.5, 0.5, reason, ha="center", va="center", color="gray", transform=axis.transAxes)
        return
    axis.set_yscale("log")
    axis.plot([], [], ".", color="gray", markersize=6, label="largest of a step")
    axis.plot([], [], "-", color="gray", linewidth=2, label="mean, smoothed")
    # Above the axes: inside, the legend could cover a point.
    axis.legend(handles=axis.lines[-2:], loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
