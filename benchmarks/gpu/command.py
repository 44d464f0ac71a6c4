"""The command `python -m benchmarks gpu`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.gpu.registry import CHECKS, Check

_RESULTS, _REHEARSAL = Path("benchmarks/results"), Path("runs/gpu-rehearsal")


def gpu(
    device: Annotated[str, typer.Option(help="cuda, or cpu for a rehearsal")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="tiny models and few rounds; figures mean nothing")] = False,
    budget_s: Annotated[float, typer.Option(help="total time; later checks are skipped (seconds)")] = 520.0,
    out: Annotated[Path | None, typer.Option(help="directory of the results; default: benchmarks/results")] = None,
    only: Annotated[str, typer.Option(help="names or groups of checks, separated by commas")] = "",
) -> None:
    """Check the CUDA path and measure it: engine, kernels, training, NCCL, the demo, speed. One process per group."""
    checks = _chosen(only)
    if device == "cuda":
        _require_cuda()
    say = Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print
    is_measurement = device == "cuda" and not small
    outcomes = _run(checks, device, small, budget_s, out or (_RESULTS if is_measurement else _REHEARSAL), say)
    if any(outcome["status"] == "failed" or "late" in outcome for outcome in outcomes):
        raise typer.Exit(1)


def _chosen(only: str) -> list[Check]:
    names = set(filter(None, only.split(",")))
    if unknown := names - {check.name for check in CHECKS} - {check.group for check in CHECKS}:
        known = ", ".join(check.name for check in CHECKS)
        raise typer.BadParameter(f"--only: there is no check {', '.join(sorted(unknown))}; known are {known}")
    return [check for check in CHECKS if not names or check.name in names or check.group in names]


def _require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("this machine has no CUDA device; for a rehearsal: --device cpu --small")


def _run(checks: list[Check], device: str, small: bool, budget_s: float, out: Path, say: Any) -> list[dict[str, Any]]:
    from benchmarks.gpu.machine import describe_gpu_machine
    from benchmarks.gpu.report import table, write_results
    from benchmarks.gpu.runner import run_checks
    from benchmarks.gpu.setting import Setting

    machine = describe_gpu_machine(device)
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="midflight-gpu-") as scratch:
        for outcome in run_checks(checks, Setting(device, small, scratch), budget_s, say):
            outcomes.append(outcome)
            write_results(out, machine, checks, outcomes)  # after every check: the machine may go away at any time
    print(table(machine, outcomes))
    say(f"results: {out}/gpu_*.json")
    return outcomes
