"""`midflight doctor` and `new`: commands for setting up a first project."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.options import Json
from midflight.metrics.jsonl import json_text


def doctor(as_json: Json = False) -> None:
    """Check that midflight works on this machine, and suggest remedies. Exit code 1 if training does not work."""
    from midflight.report.doctor import check_machine, obstacles, print_checks

    checks = check_machine(Path.cwd())
    if as_json:
        print(json_text([asdict(check) for check in checks]))
    else:
        print_checks(checks)
    raise typer.Exit(1 if obstacles(checks) else 0)


def new(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="new or empty directory")],
) -> None:
    """Write a small project that trains at once: a task, a test of the task, a recipe and a model."""
    from midflight.run.project import write_project

    write_project(directory)
    print(f"wrote {directory}; next: cd {directory} && midflight train recipe.toml")
