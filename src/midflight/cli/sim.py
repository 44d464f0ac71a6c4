"""`midflight plan`, `simulate` and `calibrate`: predictions for given hardware, and measurements of this machine.

Results go to stdout, progress to stderr.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from midflight.cli.options import Json, Overrides, RecipeArgument
from midflight.config import load_scenario
from midflight.metrics.jsonl import json_text

ScenarioArgument = Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario (TOML)")]
ScenarioOverrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="changes to the scenario")
]


def plan(
    scenario_path: ScenarioArgument,
    overrides: ScenarioOverrides = None,
    max_lag: Annotated[int | None, typer.Option(help="bound on the lag of every token (optimizer steps)")] = None,
    max_mean_lag: Annotated[float | None, typer.Option(help="bound on the mean lag (optimizer steps)")] = None,
    rate: Annotated[
        float | None, typer.Option(help="find the smallest lag for this rate (trained tokens per unit of time)")
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(help="most rollouts on one engine; default: 1024, or the end of the table of rates")
    ] = None,
    lag: Annotated[
        Literal["corrected", "paper"], typer.Option(help="max lag including training and delays, or as in the paper")
    ] = "corrected",
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="also plot rate against max lag (PNG)")] = None,
    validation_recipe: Annotated[
        Path | None,
        typer.Option(
            "--validate",
            metavar="RECIPE",
            help="instead of a plan, simulate and run this recipe, and show the differences",
        ),
    ] = None,
    schedules: Annotated[
        str, typer.Option(metavar="TYPE[:KEY=VALUE]...,...", help="with --validate: schedules to simulate and run")
    ] = "pipeline,conventional,conventional:steps_per_rl_step=4",
    seconds: Annotated[float, typer.Option(help="with --validate: training time of each run (seconds)")] = 60.0,
) -> None:
    """Plan how to split GPUs: the number of engines, the rollouts in flight, and the resulting lag."""
    from midflight.launch.planning import plan_scenario
    from midflight.report.plan_table import plan_json, plan_text
    from midflight.sim.planner.plan import Goal

    scenario = load_scenario(scenario_path, overrides or [])
    if validation_recipe:
        from midflight.experiments.variants import parse_variants
        from midflight.sim.calibration.validation import validate, validation_table

        result = validate(scenario, validation_recipe, parse_variants("schedule", schedules), seconds, _report)
        print(json_text(result) if as_json else validation_table(result["rows"]))
        return
    gpu_plan = plan_scenario(scenario, Goal(max_lag, max_mean_lag, rate), lag, max_in_flight)
    time_unit = scenario.simulation.time_unit
    if plot:
        from midflight.report.simulation_plots import plot_plan

        plot_plan(gpu_plan, time_unit, plot)
    print(json_text(plan_json(gpu_plan)) if as_json else plan_text(gpu_plan, time_unit))


def simulate(
    scenario_path: ScenarioArgument,
    overrides: ScenarioOverrides = None,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="also plot lag by step and by position (PNG)")] = None,
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="with --json: also print each rollout of every batch")
    ] = False,
) -> None:
    """Run a schedule on a virtual clock: rate of trained tokens, lag of every token, waiting times."""
    from midflight.launch.planning import estimate_scenario
    from midflight.launch.simulation import simulate_scenario
    from midflight.report.simulation_table import simulation_json, simulation_text
    from midflight.run.directory import check_output

    scenario = load_scenario(scenario_path, overrides or [])
    check_output(plot)
    result = simulate_scenario(scenario)
    estimate = estimate_scenario(scenario)
    if plot:
        from midflight.report.simulation_plots import plot_result

        plot_result(result, scenario.simulation.time_unit, plot)
    if as_json:
        print(json_text(simulation_json(result, estimate, with_rollouts=rollouts)))
    else:
        print(simulation_text(result, estimate, scenario.simulation.time_unit))


def calibrate(
    recipe_path: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="scenario file to write (TOML)")] = Path("calibrated.toml"),
    seconds: Annotated[
        float, typer.Option(help="training time of each of two long runs (seconds); best as long as the predicted runs")
    ] = 60.0,
    out_runs: Annotated[
        Path | None, typer.Option(help="new or empty directory to keep the runs in; default: not kept")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="also plot tokens per second against sequences (PNG)")] = None,
    as_json: Json = False,
) -> None:
    """Measure decoding, training and delays of this machine with real runs of a recipe, and write a scenario.

    For accurate times, nothing else should run on the machine.
    """
    from midflight.run.directory import check_output
    from midflight.sim.calibration import scenario as calibration

    check_output(out)
    check_output(plot)
    scenario, figures = calibration.calibrate(recipe_path, overrides or [], seconds, out_runs, _report)
    calibration.write_scenario(out, scenario)
    if plot:
        from midflight.report.simulation_plots import plot_rates

        plot_rates(calibration.rate_tables(scenario), "s", plot)
    _report(f"written to {out}")
    print(json_text(figures) if as_json else calibration.calibration_text(scenario))


_report = functools.partial(print, file=sys.stderr, flush=True)
