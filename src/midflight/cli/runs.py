"""`midflight train`, `demo` and `serve`: commands that run a model."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from midflight.cli.dry_run import print_dry_run
from midflight.cli.options import SHIPPED, Json, Overrides, warn
from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe, model_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import RecipeError
from midflight.metrics.jsonl import json_text

_INTRODUCTION = """\
A model of 0.6 M parameters learns to add up numbers. To the problem a3b9c4: the response a3,3b9,12c4,16=16 is right.
At first the model often guesses, as in =15. Nobody shows it solutions: it only learns which responses were right.
reward: share of right responses | lag: optimizer steps from sampling a token to training on it | ESS: 1 is on-policy
"""


def train(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|RUN_DIR", help=f"a TOML file or a shipped recipe ({SHIPPED}); with --resume a run"
        ),
    ],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an interrupted run")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="start nothing: print processes, estimated memory, expected speed and lag")
    ] = False,
    scenario: Annotated[
        Path | None, typer.Option(metavar="FILE", help="with --dry-run: hardware to expect speed and lag for (TOML)")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="with --dry-run: config.json of a model that is not here yet")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model: generate, grade and learn at the same time, with weights updated in flight."""
    from midflight.run.directory import open_run

    if (scenario or model_config) and not dry_run:
        raise RecipeError("--scenario and --model-config belong to --dry-run; add it or remove them")
    if dry_run and resume:
        raise RecipeError("--dry-run and --resume cannot be used together; remove one of them")
    if dry_run:
        print_dry_run(target, overrides or [], scenario, model_config, as_json)
    elif resume:
        _train(*open_run(target, overrides or []), as_json)
    elif target.is_dir():
        raise RecipeError(f"{target} is a directory; to continue the run in it, add --resume")
    else:
        _train(None, load_recipe(target, overrides or []), as_json)


def demo(overrides: Overrides = None, as_json: Json = False) -> None:
    """Train the model that ships with midflight to add up numbers: a minute or two on two cores, no download."""
    console = Console(stderr=True)
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    recipe = load_recipe(SHIPPED_RECIPES["cpu_demo"], overrides or [])
    say(_INTRODUCTION)
    summary = _train(None, recipe, as_json)
    run = Path(os.path.relpath(summary["run_directory"]))
    accuracy = ""
    if summary["eval_before"]:
        before, after = (summary[when]["sampled_accuracy"] for when in ("eval_before", "eval_after"))
        accuracy = f"held-out accuracy {before:.3f} -> {after:.3f}; "
    say(
        f"{accuracy}next: `midflight report {run}`, `midflight new my_project`, or open {run / 'trace.json'} in"
        " https://ui.perfetto.dev"
    )


def _train(run: RunDirectory | None, recipe: Recipe, as_json: bool) -> dict[str, Any]:
    """Train in a run directory, a new one unless given, and print the summary."""
    from midflight.report.progress import print_summary
    from midflight.run.checking import check_apart
    from midflight.run.directory import create_run
    from midflight.run.local import run_locally

    check_apart(recipe)
    warn(recipe)
    summary = run_locally(recipe, run or create_run(recipe), Console(stderr=True))
    if as_json:
        print(json_text(summary))
    else:
        print_summary(summary)
    return summary


def serve(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|MODEL_DIR", help=f"a TOML file, a shipped recipe ({SHIPPED}), or a Hugging Face directory"
        ),
    ],
    overrides: Overrides = None,
    join: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="generate for this run, which has engine.type = http")
    ] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's API, plus token ids, weight versions and in-flight weight updates."""
    from midflight.run.engine_registry import Registration
    from midflight.run.serve import serve_model

    load = model_recipe if target.is_dir() else load_recipe
    recipe = load(target, overrides or [])
    registration = Registration(join) if join else None

    def announce(url: str) -> None:
        print(f"serving at {url}", flush=True)
        if registration:
            registration.enter(url)

    retire = registration.withdraw if registration else lambda: None
    receiver = registration.receiver() if registration else None
    serve_model(recipe, announce, retire, limits_of_model=join is None, receiver=receiver)
