"""`midflight plan` and `midflight simulate`: what would be on hardware that is not there. Results on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from midflight.cli_bench import Json
from midflight.config import load_scenario

ScenarioArgument = Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario (TOML)")]
ScenarioOverrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="changes to the scenario")
]


def plan(
    scenario_path: ScenarioArgument,
    overrides: ScenarioOverrides = None,
    max_lag: Annotated[int | None, typer.Option(help="bound on any token's lag, optimizer steps")] = None,
    max_mean_lag: Annotated[float | None, typer.Option(help="bound on the mean lag, optimizer steps")] = None,
    rate: Annotated[
        float | None, typer.Option(help="trained tokens per unit of time: the least lag that is as fast")
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(help="rollouts on one engine; default: 1024, or where the table ends")
    ] = None,
    lag: Annotated[
        Literal["corrected", "paper"], typer.Option(help="max lag with training and delays, or as in the paper")
    ] = "corrected",
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="also draw rate against max lag here (PNG)")] = None,
) -> None:
    """How to split the GPUs: how many generate, with how many rollouts in flight, and what that costs in lag."""
    from midflight.launch.planning import plan_scenario
    from midflight.sim.plan_report import plan_json, plan_text
    from midflight.sim.planner import Goal

    scenario = load_scenario(scenario_path, overrides or [])
    found = plan_scenario(scenario, Goal(max_lag, max_mean_lag, rate), lag, max_in_flight)
    time_unit = scenario.simulation.time_unit
    if plot:
        from midflight.sim.plots import plot_plan

        plot_plan(found, time_unit, plot)
    print(json.dumps(plan_json(found), indent=2) if as_json else plan_text(found, time_unit))


def simulate(
    scenario_path: ScenarioArgument,
    overrides: ScenarioOverrides = None,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="also draw lag by step and by position here (PNG)")] = None,
    rollouts: Annotated[bool, typer.Option("--rollouts", help="with --json: also each rollout of every batch")] = False,
) -> None:
    """Run a schedule on a virtual clock: trained tokens per time, lag of every token, who waits."""
    from midflight.launch.planning import estimate_scenario
    from midflight.launch.simulation import simulate_scenario
    from midflight.sim.simulation_report import simulation_json, simulation_text

    scenario = load_scenario(scenario_path, overrides or [])
    outcome = simulate_scenario(scenario)
    estimate = None if scenario.batch.filter_rate else estimate_scenario(scenario)
    if plot:
        from midflight.sim.plots import plot_outcome

        plot_outcome(outcome, scenario.simulation.time_unit, plot)
    if as_json:
        print(json.dumps(simulation_json(outcome, estimate, with_rollouts=rollouts), indent=2))
    else:
        print(simulation_text(outcome, estimate, scenario.simulation.time_unit))
