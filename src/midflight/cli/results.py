"""`midflight report` and `compare`: tables and plots of finished runs, and new runs to compare."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.options import Json, Overrides, RecipeArgument
from midflight.errors import RecipeError
from midflight.metrics.jsonl import json_text

_VARIANTS = "TYPE[:KEY=VALUE]...,..."
_SCHEDULES = "conventional,pipeline,april,bounded"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="finished or interrupted runs")],
    plot: Annotated[Path | None, typer.Option(help="also plot reward against seconds and samples (PNG)")] = None,
    diagnostics: Annotated[
        Path | None, typer.Option(help="also plot off-policy measures by lag and position (PNG)")
    ] = None,
) -> None:
    """Compare finished runs in a table, and in plots."""
    from midflight.report.runs import plot_runs, run_table

    print(run_table(runs))
    if plot:
        plot_runs(runs, plot)
    if diagnostics:
        from midflight.report.diagnostics import plot_diagnostics

        plot_diagnostics(runs, diagnostics)


def compare(
    recipe_path: RecipeArgument,
    overrides: Overrides = None,
    schedules: Annotated[
        str | None, typer.Option(metavar=_VARIANTS, help="default: conventional,pipeline,april,bounded")
    ] = None,
    losses: Annotated[
        str | None, typer.Option(metavar=_VARIANTS, help="losses to compare, instead of schedules")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="training time of each run (seconds); default: 120")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps of each run, instead of seconds")] = None,
    num_seeds: Annotated[int, typer.Option("--seeds", help="runs per variant; the table shows their medians")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="new or empty directory of runs and results; default: runs/compare-DATE-TIME")
    ] = None,
    accuracy_every: Annotated[
        int, typer.Option(metavar="STEPS", help="optimizer steps between evaluated checkpoints; 0: no evaluation")
    ] = 20,
    as_json: Json = False,
) -> None:
    """Train with several schedules or losses, one after another, on the same problems, and compare the runs.

    For comparable times, nothing else should run on the machine.

    Write a KEY of another section as SECTION.KEY: --losses dapo,ppo:advantage.type=value.
    """
    from midflight.experiments.compare import plan_comparison, run_comparison
    from midflight.experiments.comparison_rows import comparison_table
    from midflight.experiments.runs import RunLength
    from midflight.experiments.variants import parse_variants

    if schedules and losses:
        raise RecipeError("--schedules and --losses cannot be used together; remove one of them")
    if seconds is not None and steps is not None:
        raise RecipeError("--seconds and --steps cannot be used together; remove one of them")
    comparison = plan_comparison(
        recipe_path,
        overrides or [],
        parse_variants("loss", losses) if losses else parse_variants("schedule", schedules or _SCHEDULES),
        length=RunLength(steps=steps) if steps is not None else RunLength(120.0 if seconds is None else seconds),
        num_seeds=num_seeds,
        accuracy_every=accuracy_every,
    )
    result = run_comparison(comparison, out, functools.partial(print, file=sys.stderr, flush=True))
    print(json_text(result) if as_json else comparison_table(result["rows"]))
