"""Results of the checks: files of JSON, targets, and a table for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.registry import Check
from midflight.metrics.jsonl import json_text

Outcome = Mapping[str, Any]
_WIDTH = 100
_INDENT = " " * 8
_REASON_LINES = 10


def write_results(
    out: Path, machine: Mapping[str, Any], checks: Sequence[Check], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """Write gpu_checks.json, and the figures of each kind to a file of their own; return the first."""
    out.mkdir(parents=True, exist_ok=True)
    kinds = {check.name: check.figures for check in checks}
    rows = [{**outcome, "rows": [] if kinds[outcome["check"]] else outcome["rows"]} for outcome in outcomes]
    result = {"machine": machine, "rows": rows, "targets": targets(outcomes)}
    _write(out / "gpu_checks.json", result)
    for kind in sorted({figures for figures in kinds.values() if figures}):
        figures = [row for outcome in outcomes if kinds[outcome["check"]] == kind for row in outcome["rows"]]
        if figures:
            _write(out / f"gpu_{kind}.json", {"machine": machine, "rows": figures})
    return result


def _write(path: Path, result: Mapping[str, Any]) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(json_text(result) + "\n")
    draft.replace(path)


def targets(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Compute the targets from the rows."""
    rows = {outcome["check"]: outcome["rows"] for outcome in outcomes if outcome["status"] == "passed"}
    listed = [_target("checks that did not pass", sum(each["status"] != "passed" for each in outcomes), most=0)]
    for name, found in rows.items():
        if name.startswith("decode"):
            ratios = [row["over_transformers"] for row in found if row.get("over_transformers")]
            listed.append(_target(f"{name}: least ratio to transformers' generate", min(ratios), least=1.0))
        if name.startswith("updates"):
            delay = max(row["longest_delay_steps"]["median"] for row in found)
            listed.append(_target(f"{name}: median longest delay (decode steps)", delay, most=1.5))
        if name == "demo_learns":
            gain = found[0]["last_reward"] - found[0]["first_reward"]
            listed.append(_target("demo: gain of reward", gain, least=0.1))
    return listed


def _target(name: str, value: float, *, most: float | None = None, least: float | None = None) -> dict[str, Any]:
    holds = (most is None or value <= most) and (least is None or value >= least)
    return {"name": name, "value": value, "limit": most if least is None else least, "holds": holds}


def table(machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Render the machine, one line per check, reasons of failures, and the main figures; 100 columns."""
    named = ("gpu", "driver", "cuda", "torch", "triton", "transformers", "python", "date")
    lines = [", ".join(f"{key} {machine[key]}" for key in named if machine.get(key))]
    for outcome in outcomes:
        lines.append(f"{outcome['status']:8}{outcome['seconds']:7.1f} s  {outcome['check']}")
        lines += _reason(outcome["reason"])
    lines += [_figure(row) for outcome in outcomes for row in outcome["rows"] if _figure(row)]
    counts = {status: sum(each["status"] == status for each in outcomes) for status in ("passed", "failed", "skipped")}
    return "\n".join([*lines, ", ".join(f"{count} {status}" for status, count in counts.items())])


def _reason(text: str) -> list[str]:
    """End of a reason, indented; its last line, the message of an error, is wrapped instead of cut."""
    *stack, message = text.strip().splitlines()[-_REASON_LINES:] or [""]
    wrapped = textwrap.wrap(message, _WIDTH - len(_INDENT))
    return [f"{_INDENT}{line}"[:_WIDTH] for line in [*stack, *wrapped]]


def _figure(row: Mapping[str, Any]) -> str:
    """One line for a row of a measurement; empty for other rows."""
    model = f"{row.get('model', ''):16}"
    if "of_roofline" in row and row["midflight"]:
        over = f", {row['over_transformers']:.1f} x transformers" if row["over_transformers"] else ""
        return (
            f"{model}decode, {row['sequences']:4} sequences: {row['midflight']:10,.0f} tokens/s"
            f", {row['of_roofline']:.0%} of the roofline{over}"
        )
    if "gemm_fraction" in row:
        return (
            f"{model}train: {row['processed_tokens_per_s']:,.0f} tokens/s, {row['gemm_fraction']:.0%} of"
            f" {row['gemm_rate'] / 1e12:.0f} TFLOP/s, {row['packed_over_padded']:.1f} x padded"
        )
    if "longest_delay_steps" in row:
        delay = row["longest_delay_steps"]
        return (
            f"{model}update: longest delay {delay['median']:.2f} decode steps of {row['median_decode_step_ms']:.1f} ms,"
            f" at most {delay['max']:.2f}"
        )
    return ""
