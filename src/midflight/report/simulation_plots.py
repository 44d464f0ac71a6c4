"""Plots of results of the formulas and the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from midflight.report.plotting import COLORS, load_pyplot, save_figure, style_axis
from midflight.sim.costs import RateTable, rates
from midflight.sim.planner.plan import Plan
from midflight.sim.simulator.result import NUM_POSITIONS, SimulationResult


def plot_plan(plan: Plan, time_unit: str, out: Path) -> None:
    """Plot, by max lag, the rates of the pipeline and of conventional RL, and the speed-up.

    Raises: MissingExtraError without matplotlib.
    Source: PipelineRL, fig. 9.
    """
    pyplot = load_pyplot()
    figure, (speed, gain) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    curve = plan.curve
    speed.step(curve.lags, curve.rates, where="post", color=COLORS[0], linewidth=2, label="pipeline")
    speed.plot(curve.lags, curve.conventional_rates, color=COLORS[1], linewidth=2, label="conventional")
    speed.plot([plan.best.max_lag], [plan.best.split.rate], "o", color=COLORS[0])
    speed.legend(frameon=False)
    gain.plot(curve.lags, curve.speed_ups, color=COLORS[2], linewidth=2)
    gain.axhline(1, color="gray", linewidth=1)
    for axis, title in ((speed, f"trained tokens per {time_unit}"), (gain, "times as fast as conventional")):
        axis.set(xscale="log", xlabel="max lag, optimizer steps", ylabel=title, ylim=(0, None))
        style_axis(axis)
    save_figure(figure, out)


def plot_rates(tables: Mapping[str, RateTable], time_unit: str, out: Path) -> None:
    """Plot U(h) of one engine, one curve per label. Raises: MissingExtraError without matplotlib."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for (label, table), color in zip(tables.items(), COLORS, strict=False):
        sizes = np.arange(1, table.sizes[-1] + 1)
        axis.plot(sizes, rates(table, sizes), color=color, linewidth=2, label=label)
        axis.plot(table.sizes, table.rates, "o", color=color)
    title = f"sampled tokens per {time_unit}"
    axis.set(xlabel="sequences in flight", ylabel=title, xlim=(0, None), ylim=(0, None))
    axis.legend(frameon=False)
    style_axis(axis)
    save_figure(figure, out)


def plot_result(result: SimulationResult, time_unit: str, out: Path) -> None:
    """Plot a simulated run: mean and max lag of each batch, lag by position in a response, and tokens over time.

    Raises: MissingExtraError without matplotlib.
    """
    pyplot = load_pyplot()
    figure, (lags, positions, speed) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    steps = [batch.index for batch in result.measured]
    lags.plot(steps, result.max_lags, ".", markersize=2, color=COLORS[1], label="max of the batch")
    lags.plot(steps, result.mean_lags, ".", markersize=2, color=COLORS[0], label="mean of the batch")
    lags.set(xlabel="optimizer step", ylabel="lag, optimizer steps")
    lags.legend(frameon=False, markerscale=4)
    middles = (np.arange(NUM_POSITIONS) + 0.5) / NUM_POSITIONS
    positions.plot(middles, result.lag_by_position, "o-", markersize=3, color=COLORS[0])
    positions.set(xlabel="position, of the longest response", ylabel="mean lag, optimizer steps")
    ends = np.array([result.start, *(batch.end for batch in result.measured)])
    tokens = np.cumsum([0, *(batch.num_tokens for batch in result.measured)])
    speed.plot(ends - ends[0], tokens, color=COLORS[2])
    speed.set(xlabel=f"time, {time_unit}", ylabel="trained tokens")
    for axis in (lags, positions, speed):
        axis.set_ylim(bottom=0)
        style_axis(axis)
    save_figure(figure, out)
