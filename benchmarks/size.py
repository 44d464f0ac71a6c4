"""Size of the package: lines in the wheel, longest file, longest function."""

from __future__ import annotations

import ast
import datetime
import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

_PACKAGE = Path(__file__).parents[1] / "src" / "midflight"
_LIMITS = {"lines": 20_500, "longest_file": 400, "longest_function": 60, "median_file": 100}


def size(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Print the lines in the wheel by package, blank lines and comments included, and check the limits."""
    lines = {path: len(path.read_text().splitlines()) for path in sorted(_PACKAGE.rglob("*.py"))}
    functions = {where: length for path in lines for where, length in _functions(path).items()}
    figures = {
        "lines": sum(lines.values()),
        "longest_file": max(lines.values()),
        "longest_function": max(functions.values()),
        "median_file": statistics.median(lines.values()),
    }
    result = {
        "date": datetime.date.today().isoformat(),
        "rows": _by_package(lines),
        "longest_files": sorted(((count, _name(path)) for path, count in lines.items()), reverse=True)[:5],
        "longest_functions": sorted(((length, where) for where, length in functions.items()), reverse=True)[:5],
        "targets": [
            {"name": name, "value": figures[name], "limit": limit, "holds": figures[name] <= limit}
            for name, limit in _LIMITS.items()
        ],
    }
    print(json.dumps(result, indent=2) if as_json else _text(result))


def _by_package(lines: dict[Path, int]) -> list[dict[str, Any]]:
    packages: dict[str, list[int]] = {}
    for path, count in lines.items():
        parts = path.relative_to(_PACKAGE).parts
        packages.setdefault(parts[0] if len(parts) > 1 else "(root)", []).append(count)
    return [{"package": name, "files": len(counts), "lines": sum(counts)} for name, counts in packages.items()]


def _functions(path: Path) -> dict[str, int]:
    """Number of lines of every function, docstring included, by file and line."""
    return {
        f"{_name(path)}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _name(path: Path) -> str:
    return str(path.relative_to(_PACKAGE))


def _text(result: dict[str, Any]) -> str:
    rows = [f"{row['package']:14}{row['files']:4} files{row['lines']:7,} lines" for row in result["rows"]]
    largest = [f"{count:4} {where}" for count, where in [*result["longest_files"], *result["longest_functions"]]]
    targets = [f"{target['name']}: {target['value']:,g} of {target['limit']:,}" for target in result["targets"]]
    return "\n".join([*rows, "", *largest, "", *targets])
