"""Plots of what the formulas and the simulator say."""

from __future__ import annotations

from pathlib import Path

from midflight.plotting import COLORS, load_pyplot, style_axis
from midflight.sim.planner import Plan


def plot_plan(plan: Plan, time_unit: str, out: Path) -> None:
    """Rate by max lag of the pipeline and of conventional RL, and how many times as fast that is.

    Raises: MissingExtraError without matplotlib.
    Source: PipelineRL, fig. 9.
    """
    pyplot = load_pyplot()
    figure, (speed, gain) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    curve = plan.curve
    speed.step(curve.lags, curve.rates, where="post", color=COLORS[0], linewidth=2, label="pipeline")
    speed.plot(curve.lags, curve.conventional_rates, color=COLORS[1], linewidth=2, label="conventional")
    speed.plot([plan.best.max_lag], [plan.best.split.rate], "o", color=COLORS[0])
    speed.set_ylabel(f"trained tokens per {time_unit}")
    speed.legend(frameon=False)
    gain.plot(curve.lags, curve.speed_ups, color=COLORS[2], linewidth=2)
    gain.axhline(1, color="gray", linewidth=1)
    gain.set_ylabel("times as fast as conventional")
    for axis in (speed, gain):
        axis.set_xscale("log")
        axis.set_xlabel("max lag, optimizer steps")
        axis.set_ylim(bottom=0)
        style_axis(axis)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
