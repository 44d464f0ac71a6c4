"""The command line. Results go to stdout, everything else to stderr.

Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 130 interrupted (the run can be resumed).
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from midflight.cli_bench import Json, bench_app
from midflight.cli_sim import calibrate, plan, simulate
from midflight.config import describe_recipe, describe_scenario, dump_toml, load_recipe
from midflight.errors import MidflightError, RecipeError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
config_app = typer.Typer(no_args_is_help=True, help="Look at recipes without running them.")
app.add_typer(config_app, name="config")

app.add_typer(bench_app, name="bench")
app.command()(plan)
app.command()(calibrate)
app.command()(simulate)

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="a recipe (TOML)")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="changes to the recipe")]


@app.command()
def train(
    target: Annotated[Path, typer.Argument(metavar="RECIPE|RUN_DIR", help="a recipe, or with --resume a run")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an interrupted run")] = False,
    as_json: Json = False,
) -> None:
    """Train: generate, score and learn at the same time, with weights updated in flight."""
    from midflight.launch.build import check_recipe
    from midflight.launch.local import run_locally
    from midflight.launch.progress import print_summary
    from midflight.launch.run_directory import create_run, open_run

    console = Console(stderr=True)
    if resume:
        run, recipe = open_run(target, overrides or [])
        check_recipe(recipe)
    else:
        if target.is_dir():
            raise RecipeError(f"{target} is a directory; to go on with the run in it, add --resume")
        recipe = load_recipe(target, overrides or [])
        check_recipe(recipe)
        run = create_run(recipe)
    summary = run_locally(recipe, run, console)
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        print_summary(summary)


@app.command(name="eval")
def evaluate(
    recipe_path: RecipeArgument,
    overrides: Overrides = None,
    checkpoint: Annotated[Path | None, typer.Option(help="a model directory; default: the recipe's model")] = None,
) -> None:
    """Accuracy of a checkpoint on held-out problems, as JSON."""
    from dataclasses import asdict

    from midflight.launch.build import check_evaluation
    from midflight.launch.evaluation import evaluate_model

    recipe = load_recipe(recipe_path, overrides or [])
    if checkpoint:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": checkpoint.resolve()})})
    check_evaluation(recipe)
    print(json.dumps(asdict(evaluate_model(recipe, recipe.model.path)), indent=2))


@app.command()
def serve(
    recipe_path: RecipeArgument,
    overrides: Overrides = None,
    join: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="generate for this run, whose engine.type is http")
    ] = None,
) -> None:
    """Serve the model over HTTP: OpenAI's API, token ids and weight versions, in-flight weight updates."""
    from midflight.launch.engine_registry import Registration
    from midflight.launch.serve import serve_model

    recipe = load_recipe(recipe_path, overrides or [])
    registration = Registration(join) if join else None

    def announce(url: str) -> None:
        print(f"serving at {url}", flush=True)
        if registration:
            registration.enter(url)

    serve_model(recipe, announce, registration.withdraw if registration else lambda: None)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="finished or interrupted runs")],
    plot: Annotated[Path | None, typer.Option(help="also draw reward against seconds and samples here (PNG)")] = None,
    diagnostics: Annotated[
        Path | None, typer.Option(help="also draw here how far off-policy tokens were, by lag and position (PNG)")
    ] = None,
) -> None:
    """Compare runs: a table, and plots."""
    from midflight.launch.report import plot_runs, run_table

    print(run_table(runs))
    if plot:
        plot_runs(runs, plot)
    if diagnostics:
        from midflight.launch.diagnostics import plot_diagnostics

        plot_diagnostics(runs, diagnostics)


_VARIANTS = "TYPE[:KEY=VALUE]...,..."
_SCHEDULES = "conventional,pipeline,april,bounded"


@app.command()
def compare(
    recipe_path: RecipeArgument,
    overrides: Overrides = None,
    schedules: Annotated[
        str | None, typer.Option(metavar=_VARIANTS, help="default: conventional,pipeline,april,bounded")
    ] = None,
    losses: Annotated[str | None, typer.Option(metavar=_VARIANTS, help="what to compare instead of schedules")] = None,
    seconds: Annotated[float | None, typer.Option(help="of training, for each run; default: 120")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps of each run, instead of seconds")] = None,
    num_seeds: Annotated[int, typer.Option("--seeds", help="runs of each; medians over them are shown")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="new or empty, for runs and results; default runs/compare-DATE-TIME")
    ] = None,
    accuracy_every: Annotated[
        int, typer.Option(metavar="STEPS", help="evaluate checkpoints so many optimizer steps apart; 0: none")
    ] = 20,
    as_json: Json = False,
) -> None:
    """Run a recipe under several schedules or losses in turn: same problems. Leave the machine alone meanwhile.

    A KEY of another section is written SECTION.KEY, as in --losses dapo,ppo:advantage.type=value.
    """
    from midflight.bench.compare import RunLength, plan_comparison, run_comparison
    from midflight.bench.comparison_rows import comparison_table
    from midflight.bench.variants import parse_variants

    if schedules and losses:
        raise RecipeError("--schedules and --losses: one of them at a time")
    if seconds is not None and steps is not None:
        raise RecipeError("--seconds and --steps: one of them at a time")
    comparison = plan_comparison(
        recipe_path,
        overrides or [],
        parse_variants("loss", losses) if losses else parse_variants("schedule", schedules or _SCHEDULES),
        length=RunLength(steps=steps) if steps is not None else RunLength(120.0 if seconds is None else seconds),
        num_seeds=num_seeds,
        accuracy_every=accuracy_every,
    )
    result = run_comparison(comparison, out, functools.partial(print, file=sys.stderr, flush=True))
    print(json.dumps(result, indent=2) if as_json else comparison_table(result["rows"]))


@config_app.command()
def show(recipe_path: RecipeArgument, overrides: Overrides = None) -> None:
    """The resolved recipe, defaults included."""
    print(dump_toml(load_recipe(recipe_path, overrides or [])))


@config_app.command()
def check(recipe_path: RecipeArgument, overrides: Overrides = None) -> None:
    """Whether a recipe would run: keys, values, model directory, tokenizer."""
    from midflight.launch.build import check_recipe

    check_recipe(load_recipe(recipe_path, overrides or []))
    print(f"{recipe_path}: ok")


@config_app.command()
def keys(
    scenario: Annotated[bool, typer.Option("--scenario", help="of scenarios, instead of recipes")] = False,
) -> None:
    """Every recipe key with its type, default and meaning."""
    for key, kind, default, description in describe_scenario() if scenario else describe_recipe():
        print(
            f"{key}  ({kind}, default {default})\n    {description}"
            if description
            else f"{key}  ({kind}, default {default})"
        )


def main() -> None:
    """Run the command line; every midflight error is one line."""
    # For losses and environments of the user's own; at the end, so that nothing lying there replaces a package.
    sys.path.append(str(Path.cwd()))
    try:
        app(standalone_mode=True)
    except MidflightError as error:
        print(f"midflight: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
