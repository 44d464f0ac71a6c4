"""The results of an evaluation as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midflight.report.text_table import text_table


def evaluation_table(evaluation: Mapping[str, Any]) -> str:
    """Return one row per set, and indented rows for its difficulties and categories; `evaluation` as in JSON.

    Each figure is followed by its standard error.
    """
    rows: list[list[str]] = [["set", "problems", "samples", "avg@k", "pass@1", "pass@k", "maj@k", "tokens", "ungraded"]]
    for name, result in evaluation["sets"].items():
        samples = str(result["samples"])
        rest = [_rounded(result["mean_length"], 1), str(result["num_ungraded"])]
        rows.append([name, str(result["num_problems"]), samples, *_figures(result, samples), *rest])
        for title in ("difficulty", "category"):
            for part_name, part in result[f"by_{title}"].items():
                figures = _figures(part, samples)
                rows.append([f"  {title} {part_name}", str(part["num_problems"]), "", *figures, "", ""])
    lines = [text_table(rows)]
    if evaluation["greedy_accuracy"] is not None:
        lines.append(f"greedy accuracy on held-out problems: {evaluation['greedy_accuracy']:.3f}")
    return "\n".join(lines)


def _figures(part: Mapping[str, Any], samples: str) -> list[str]:
    passes = part["pass_at"] or {}
    return [_estimate(part["avg"]), *(_estimate(passes.get(k)) for k in ("1", samples)), _estimate(part["maj"])]


def _estimate(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    error = estimate["standard_error"]
    return f"{estimate['value']:.3f}" if error is None else f"{estimate['value']:.3f} ± {error:.3f}"


def _rounded(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
