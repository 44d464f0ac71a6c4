"""The command `python -m benchmarks tasks`: every part's figures, and the limits that they must keep."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from midflight.metrics.jsonl import json_text
from midflight.report.machine import describe_machine

# Each part is a module of this package with `measure(say)`, which returns rows and targets.
PARTS = ("data", "rewards", "sandbox", "evals")


def tasks(
    parts: Annotated[str, typer.Option(help="parts to measure, separated by commas")] = ",".join(PARTS),
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Datasets, rewards, the sandbox and evaluation: what they cost and whether they keep their promises."""
    names = parts.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        raise typer.BadParameter(f"there is no part {', '.join(unknown)}; known are {', '.join(PARTS)}")
    result = measure(names, Console(stderr=True).print)
    print(json_text(result) if as_json else _text(result))
    if not all(target["holds"] for target in result["targets"]):
        raise typer.Exit(1)


def measure(parts: list[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the rows and targets of some parts, with the machine and the date."""
    rows: list[dict[str, Any]] = []
    targets: list[dict[str, Any]] = []
    for part in parts:
        part_rows, part_targets = importlib.import_module(f"benchmarks.tasks.{part}").measure(say)
        rows += [{"part": part, **row} for row in part_rows]
        targets += part_targets
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "rows": rows,
        "targets": targets,
    }


def _text(result: dict[str, Any]) -> str:
    rows = [", ".join(f"{key} {_short(value)}" for key, value in row.items()) for row in result["rows"]]
    targets = [
        f"{'ok    ' if target['holds'] else 'MISSED'} {target['name']}: {_short(target['value'])}"
        f" (limit {_short(target['limit'])})"
        for target in result["targets"]
    ]
    return "\n".join([*rows, "", *targets])


def _short(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
