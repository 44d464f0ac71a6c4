"""Pictures of docs/planner.md and their numbers: `make planner-figures`, about three minutes on one core.

    python -m benchmarks.planner_figures            # all pictures
    python -m benchmarks.planner_figures collation  # selected pictures

Results depend on scenarios and seeds only, not on the machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_runs import (
    Numbers,
    beside_formula,
    bounded_point,
    collated,
    decode_rate,
    dynamic_sampling,
    mean,
    over_sampled,
    paper,
    paper_in_turns,
    paper_plan,
    scaled_decoding,
    share_below,
    share_until_half,
    speed_point,
)
from midflight.launch.simulation import simulate_scenario
from midflight.report.plotting import COLORS, load_pyplot, style_axis
from midflight.sim.costs import PAPER_STEP_COST, rates
from midflight.sim.formulas.draining import drain
from midflight.sim.lengths import LengthDistribution, lognormal, uniform
from midflight.sim.simulator.result import NUM_POSITIONS, SimulationResult

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
NUMBERS = ROOT / "benchmarks" / "results" / "planner_figures.json"


def draining(images: Path) -> Numbers:
    """Draw a draining batch. Source: PipelineRL, figures 2b and 2c."""
    figure, (active, times, speeds) = load_pyplot().subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    distributions = {"uniform to 8192": uniform(8192), "lognormal to 16384": lognormal(2000, 1.0, 16384)}
    shares: Numbers = {}
    for color, (name, lengths) in zip(COLORS, distributions.items(), strict=False):
        batch = drain(lengths, PAPER_STEP_COST, 256)
        ends = batch.times.cumsum() / batch.duration
        active.plot([0, *ends], [1, *(batch.active / 256)], color=color, linewidth=2, label=name)
        shares[name] = {"time_until_half": share_until_half(batch), "time_below_64": share_below(batch, 64)}
    active.set(xlabel="share of the generation phase", ylabel="share of 256 in flight", xlim=(0, 1), ylim=(0, 1.02))
    active.legend(frameon=False, loc="upper right")
    sizes = [2**power for power in range(10)]
    batches = [drain(uniform(8192), PAPER_STEP_COST, size) for size in sizes]
    over_single = [batch.duration / batches[0].duration for batch in batches]
    for axis, values in ((times, over_single), (speeds, [decode_rate(batch) for batch in batches])):
        axis.plot(sizes, values, "o-", color=COLORS[0], markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axis.set(xlabel="sequences per GPU, uniform to 8192", ylim=(0, None))
    times.set_ylabel("duration relative to one sequence")
    speeds.set_ylabel("tokens per flash and GPU")
    _save(figure, images / "planner_draining.png")
    return {
        "256_sequences": shares,
        "sequences": sizes,
        "time_over_single": over_single,
        "rate": [decode_rate(batch) for batch in batches],
    }


def lag(images: Path) -> Numbers:
    """Draw the lag of tokens by position in a response and by optimizer step. Source: PipelineRL, figure 3a."""
    num_shown = 3 * 121
    scenarios = {
        "pipeline": paper("lengths.max=1024", "cluster.num_engines=40"),
        "conventional": paper_in_turns(121, num_shown, "lengths.max=1024"),
    }
    figure, (positions, steps) = load_pyplot().subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    middles = (np.arange(NUM_POSITIONS) + 0.5) / NUM_POSITIONS
    numbers: Numbers = {}
    for color, (name, scenario) in zip(COLORS, scenarios.items(), strict=False):
        run = simulate_scenario(scenario)
        positions.plot(middles, run.lag_by_position, "o-", color=color, markersize=3, label=name)
        steps.plot(run.mean_lags[:num_shown], color=color, label=f"{name}, mean of the batch")
        if name == "pipeline":
            steps.plot(run.max_lags[:num_shown], ".", color=COLORS[5], markersize=3, label="pipeline, maximum")
        numbers[name] = beside_formula(run, scenario) | {"mean_lag_by_position": run.lag_by_position.tolist()}
    positions.set(xlabel="position as a share of the longest response", ylabel="mean lag, optimizer steps", xlim=(0, 1))
    steps.set(xlabel="optimizer step", ylabel="lag, optimizer steps")
    for axis in (positions, steps):
        axis.set_ylim(0, 170)
        axis.legend(frameon=False, loc="upper right", ncols=2, fontsize=8, markerscale=2)
    _save(figure, images / "planner_lag.png")
    return numbers


def decoding(images: Path) -> Numbers:
    """Draw the reconstructed U(h), and plan with multiples of it. Source: PipelineRL, figure 8."""
    figure, axis = load_pyplot().subplots(figsize=(6.5, 3.6), layout="constrained")
    in_flight = np.arange(1, 1153)
    axis.plot(in_flight, rates(PAPER_STEP_COST, in_flight), color=COLORS[0], linewidth=1, label="padded to 64")
    axis.plot(PAPER_STEP_COST.sizes, PAPER_STEP_COST.rates, "o", color=COLORS[1], markersize=4, label="the table")
    axis.set(xlabel="sequences in flight, h", ylabel="U(h), tokens per flash", xlim=(0, 1152), ylim=(0, 0.7))
    axis.legend(frameon=False, loc="lower right")
    _save(figure, images / "planner_decoding.png")
    return {
        "sizes": PAPER_STEP_COST.sizes,
        "rates": PAPER_STEP_COST.rates,
        "rates_multiplied": [scaled_decoding(factor) for factor in (0.25, 0.5, 0.75, 1.0, 1.25)],
    }


def speed(images: Path) -> Numbers:
    """Draw the rate by max lag, from formulas and simulation. Source: PipelineRL, figure 9."""
    figure, (speeds, gains) = load_pyplot().subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    curve = paper_plan().curve
    speeds.step(curve.lags, curve.rates, where="post", color=COLORS[0], label="pipeline")
    speeds.plot(curve.lags, curve.conventional_rates, color=COLORS[1], label="conventional")
    gains.plot(curve.lags, curve.speed_ups, color=COLORS[2], label="by the formulas")
    gains.axhline(1, color="gray", linewidth=1)
    points = [speed_point(max_lag) for max_lag in (9, 33, 66, 100, 133)]
    lags = [point["max_lag"] for point in points]
    for color, name in zip(COLORS, ("pipeline", "conventional"), strict=False):
        simulated = [point[name]["simulated"]["rate"] for point in points]
        speeds.plot(lags, simulated, "o", color=color, markersize=5, label=f"{name}, simulated")
    simulated = [point["speed_up"]["simulated"] for point in points]
    gains.plot(lags, simulated, "o", color=COLORS[2], markersize=5, label="simulated")
    speeds.set_ylabel("trained tokens per flash")
    gains.set_ylabel("speed-up over conventional")
    for axis in (speeds, gains):
        axis.set(xlabel="max lag, optimizer steps", xlim=(0, 300), ylim=(0, None))
        axis.legend(frameon=False, loc="lower right")
    _save(figure, images / "planner_speed.png")
    return {"points": points}


def april(images: Path) -> Numbers:
    """Draw the gain and the token age of over-sampling, and its gain under dynamic sampling."""
    figure, axes = load_pyplot().subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    gains, shares, filtering = axes
    factors = (1.0, 1.25, 1.5, 2.0, 3.0)
    numbers: Numbers = {"over_sampling": factors, "gain": {}}
    for color, (name, slope) in zip(COLORS, {"1": 0.0, "1 + h/64": 1 / 64, "1 + h/32": 1 / 32}.items(), strict=False):
        runs = [over_sampled(factor, slope) for factor in factors]
        speeds = [mean(run.generated_rate for run in seeds) for seeds in runs]
        numbers["gain"][name] = gain = [rate / speeds[0] for rate in speeds]
        gains.plot(factors, gain, "o-", color=color, markersize=4, label=f"step time {name}")
        if name == "1 + h/64":
            numbers["old_token_fraction"] = [mean(_old_fraction(run) for run in seeds) for seeds in runs]
            numbers["carried_in_fraction"] = [mean(run.carried_in_fraction for run in seeds) for seeds in runs]
            numbers["max_versions"] = [max(int(run.num_versions.max()) for run in seeds) for seeds in runs]
    labels = {
        "old_token_fraction": "trained, from older weights",
        "carried_in_fraction": "carried in from earlier iterations",
    }
    for color, (name, label) in zip(COLORS[3:], labels.items(), strict=False):
        shares.plot(factors, numbers[name], "o-", color=color, markersize=4, label=label)
    numbers["dynamic_sampling"] = dynamic = [dynamic_sampling(filter_rate) for filter_rate in (0.0, 0.2, 0.3, 0.5)]
    filter_rates = [row["filter_rate"] for row in dynamic]
    for color, kind in zip(COLORS, ("trained", "generated"), strict=False):
        gain = [row[f"gain_{kind}"] for row in dynamic]
        filtering.plot(filter_rates, gain, "o-", color=color, markersize=4, label=f"{kind} tokens")
    gains.set(xlabel="over-sampling F", ylabel="rate relative to waiting for all", ylim=(0, 7.5))
    shares.set(xlabel="over-sampling F", ylabel="share of tokens", ylim=(0, 1.25))
    filtering.set(xlabel="share of groups filtered, F = 2", ylabel="rate relative to the restart baseline", ylim=(0, 3))
    for axis in axes:
        axis.legend(frameon=False, loc="upper left", fontsize=8)
    for axis in (gains, filtering):
        axis.axhline(1, color="gray", linewidth=1)
    _save(figure, images / "planner_april.png")
    return numbers


def collation(images: Path) -> Numbers:
    """Draw microbatches packed in order and longest first. Source: Magistral, section 3."""
    figure, axes = load_pyplot().subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    cases: dict[str, tuple[LengthDistribution, int]] = {}
    for name, lengths in (("lognormal", lognormal(3000, 0.9, 16384)), ("uniform", uniform(8192))):
        cases |= {f"{name}\nC = {times if times > 1 else ''}L": (lengths, times * lengths.max) for times in (1, 2, 4)}
    numbers = {name.replace("\n", ", "): collated(*case) for name, case in cases.items()}
    places = np.arange(len(cases))
    for axis, kind in zip(axes, ("microbatches", "padding"), strict=True):
        for index, (key, label) in enumerate((("in_order", "in order"), ("greedy", "longest first"))):
            heights = [row[f"{kind}_{key}"] for row in numbers.values()]
            axis.bar(places + 0.38 * (index - 0.5), heights, 0.36, color=COLORS[1 - index], label=label)
        axis.set_xticks(places, list(cases), fontsize=8)
        axis.legend(frameon=False, loc="upper right")
    axes[0].set_ylabel("microbatches of 512 sequences")
    axes[1].set_ylabel("share that is padding")
    _save(figure, images / "planner_collation.png")
    return numbers


def bound(images: Path) -> Numbers:
    """Draw the cost of a hard bound on lag, in rate and in mean lag."""
    figure, axes = load_pyplot().subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    rows = [bounded_point(max_lag) for max_lag in (16, 32, 64, 128)]
    lags = [row["max_lag"] for row in rows]
    for axis, key in zip(axes, ("rate", "mean_lag"), strict=True):
        bounded, planned = ([row[name][key] for row in rows] for name in ("bounded", "planned"))
        axis.plot(lags, bounded, "o-", color=COLORS[0], markersize=6, label="hard bound, simulated")
        axis.plot(lags, planned, "o--", color=COLORS[1], markersize=4, label="planned for that lag, no hard bound")
        axis.set(xlabel="max lag, optimizer steps", xlim=(0, 135))
        axis.legend(frameon=False, loc="upper left")
    axes[0].set(ylabel="trained tokens per flash", ylim=(0, 22))
    axes[1].set(ylabel="mean lag, optimizer steps", ylim=(0, 110))
    _save(figure, images / "planner_bound.png")
    return {"rows": rows}


FIGURES: dict[str, Callable[[Path], Numbers]] = {
    draw.__name__: draw for draw in (draining, lag, decoding, speed, april, collation, bound)
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FIGURES)}; default: all")
    names = parser.parse_args(arguments).names or list(FIGURES)
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        parser.error(f"there is no picture {unknown[0]}; choose from {', '.join(FIGURES)}")
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for name in names:
        numbers[name] = _rounded(FIGURES[name](IMAGES))
        print(IMAGES / f"planner_{name}.png", flush=True)
    NUMBERS.write_text(json.dumps({name: numbers[name] for name in FIGURES if name in numbers}, indent=1) + "\n")


def _old_fraction(run: SimulationResult) -> float:
    """Share of trained tokens that older weights sampled."""
    return 1 - run.lag_histogram.get(0, 0) / sum(run.lag_histogram.values())


def _save(figure: Any, path: Path) -> None:
    figure.get_layout_engine().set(w_pad=0.1)
    for axis in figure.axes:
        style_axis(axis)
    figure.savefig(path, dpi=120)
    load_pyplot().close(figure)


def _rounded(value: Any) -> Any:
    """Round to five digits, as further digits may differ between versions of numpy."""
    if isinstance(value, dict):
        return {key: _rounded(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(member) for member in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
