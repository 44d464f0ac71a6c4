"""Memory of every process of a run, and of its parts, beside the estimates of a dry run.

Totals are measured. Interpreter and libraries are measured, too: as the memory of the same process in a run of the
demo, whose model is tiny. Sizes of tensors are those of the dry run. The rest is what these do not explain.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.smollm2 import FREQUENT_REWARD
from benchmarks.watched_memory import Usage, WatchedMemory, shared_memory_mb, usage_by_role
from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe
from midflight.errors import BenchmarkError
from midflight.launch.build import lora_settings
from midflight.launch.dry_run import dry_run
from midflight.launch.memory import ModelSizes, compute_dtype, engine_memory
from midflight.models.smollm2 import smollm2_directory
from midflight.report.machine import describe_machine

Figures = dict[str, Any]
DEMO = "cpu_demo"
_TOGETHER = ("trainer", "rollout")
_TOTAL, _LIBRARIES, _REST = "total", "interpreter and libraries", "rest"
# Processes of a dry run by the role that holds their memory. Shared memory belongs to the whole run.
_ROLES = {
    "trainer": "trainer",
    "engine in rollout": "rollout",
    "reference model": "preprocess",
}
_MB = 1e6
_MAX_SUPERVISOR_MB = 200.0
_MAX_GRADER_MB = 150.0
_MAX_COPIES = 2.5  # of the weights, in the rollout process
_FLOATS_PER_PARAMETER = 4  # master, gradient and two moments in float32
_BUCKET_BYTES = 32 << 20
_MAX_ERROR = 0.2  # of a dry run
_MICROBATCH = "batch.max_tokens=512"  # few enough that the batches of every recipe fill some microbatches


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of the measurement. `recipes`: besides the demo; `steps`: optimizer steps of each run."""

    recipes: tuple[str, ...]
    steps: int
    num_problems: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory of one run (MB): by role, and of its shared weights."""

    recipe: Recipe
    usage: dict[str, Usage]
    shared_mb: float


def bench_memory(options: MemoryOptions, report: Callable[[str], None]) -> Figures:
    """Return a row per process and part of each recipe, and the targets. Raises: BenchmarkError if a run fails."""
    machine = describe_machine()
    demo = _measure(DEMO, options)
    rows, targets = [*rows_of(demo, None)], _process_targets(demo)
    report(f"{DEMO}: measured")
    for name in options.recipes:
        measured = _measure(name, options)
        own = list(rows_of(measured, demo))
        rows += own
        targets += [*_process_targets(measured), *tensor_targets(measured.recipe, own)]
        report(f"{name}: measured")
    return {"machine": machine, "steps": options.steps, "rows": rows, "targets": targets}


def memory_table(result: Figures) -> str:
    """Return the rows as text."""
    lines = [f"{'recipe':14}{'process':16}{'part':36}{'steady MB':>10}{'peak MB':>10}"]
    lines += [
        f"{row['recipe']:14}{row['process']:16}{row['part']:36}{_cell(row['steady_mb'])}{_cell(row['peak_mb'])}"
        for row in result["rows"]
    ]
    lines += [
        f"{target['name']}: {target['value']:.2f}, limit {target['limit']:.2f}{'' if target['holds'] else ': MISSED'}"
        for target in result["targets"]
    ]
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return f"{value:10,.0f}" if value is not None else f"{'-':>10}"


def _measure(name: str, options: MemoryOptions) -> Measured:
    overrides = [f"trainer.max_steps={options.steps}", f"eval.num_problems={options.num_problems}", _MICROBATCH]
    if name.startswith("smollm2"):
        overrides += [f"model.path={smollm2_directory()}", FREQUENT_REWARD]
    recipe = load_recipe(SHIPPED_RECIPES.get(name, Path(name)), overrides)
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [sys.executable, "-m", "midflight", "train", name, f"run.directory={run}", "--json", *overrides]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
            WatchedMemory(process.pid, run) as watched,
        ):
            _, errors = process.communicate()
    if process.returncode:
        raise BenchmarkError(f"the run of {name} failed: {(errors.strip().splitlines() or ['without a message'])[-1]}")
    return Measured(recipe, usage_by_role(watched.samples, _TOGETHER), shared_memory_mb(watched.samples, _TOGETHER))


def rows_of(measured: Measured, demo: Measured | None) -> Iterator[Figures]:
    """Yield a row per process and part; without `demo`, libraries count as the rest."""
    name = measured.recipe.run.name
    estimates = estimated_parts(measured.recipe)
    for role, usage in measured.usage.items():
        if role in ("check", "other"):
            continue
        parts = {part: num_bytes / _MB for part, num_bytes in estimates.get(role, {}).items()}
        yield _row(name, role, _TOTAL, usage.steady, usage.peak)
        if role not in estimates:
            continue
        steady_parts = {part: mb for part, mb in parts.items() if part not in ("activations", "logits")}
        rest = [usage.steady - sum(steady_parts.values()), usage.peak - sum(parts.values())]
        for part, mb in parts.items():
            yield _row(name, role, part, steady_parts.get(part), mb)
        if demo and role in demo.usage:
            libraries = _libraries(demo, role)
            yield _row(name, role, _LIBRARIES, libraries.steady, libraries.peak)
            rest = [rest[0] - libraries.steady, rest[1] - libraries.peak]
        yield _row(name, role, _REST, *rest)
    yield _row(name, "all", "shared weights", measured.shared_mb, measured.shared_mb)


def _row(recipe: str, process: str, part: str, steady_mb: float | None, peak_mb: float) -> Figures:
    return {"recipe": recipe, "process": process, "part": part, "steady_mb": steady_mb, "peak_mb": peak_mb}


def _libraries(demo: Measured, role: str) -> Usage:
    """Memory of a process of the demo without its few tensors."""
    usage, tensors = demo.usage[role], sum(estimated_parts(demo.recipe)[role].values()) / _MB
    return Usage(usage.steady - tensors, usage.peak - tensors, usage.peak_private - tensors)


def estimated_parts(recipe: Recipe) -> dict[str, dict[str, int]]:
    """Return the tensors that each role holds, as a dry run estimates them (bytes)."""
    memory = dry_run(recipe)["memory"]
    parts: dict[str, dict[str, int]] = {role: {} for role in ("trainer", "rollout", "preprocess", "evaluation")}
    for process in memory["processes"]:
        if role := _ROLES.get(process["process"]):
            own = process["process"] in ("trainer", "engine in rollout")
            parts[role].update(
                {part if own else process["process"]: num_bytes for part, num_bytes in process["parts"].items()}
            )
    sizes = _sizes(recipe)
    weights = parts["trainer"].pop("weights")
    masters = 4 * sizes.num_trained
    copies = {"masters": masters, "copy for the forward pass": weights - masters}
    parts["trainer"] = {part: num_bytes for part, num_bytes in copies.items() if num_bytes} | parts["trainer"]
    parts["evaluation"] = engine_memory(
        sizes,
        recipe.engine.model_copy(update={"weight_sets": 1}),  # it gets no updates
        "float32",
        recipe.eval.num_in_flight,
        recipe.engine.max_prompt_tokens + recipe.max_eval_tokens,
    )
    return parts


def _sizes(recipe: Recipe) -> ModelSizes:
    return ModelSizes.of(recipe.model.path, lora_settings(recipe))


def _process_targets(measured: Measured) -> list[Figures]:
    name = measured.recipe.run.name
    supervisor, grader = measured.usage["supervisor"].peak, measured.usage["grader"].peak_private
    return [
        _target(f"{name}: supervisor (MB)", supervisor, _MAX_SUPERVISOR_MB),
        _target(f"{name}: each grading process (MB)", grader, _MAX_GRADER_MB),
    ]


def tensor_targets(recipe: Recipe, rows: Sequence[Figures]) -> list[Figures]:
    """Compare the tensors of trainer and rollout process, at their peak and without libraries, with the goals."""
    peaks = {(row["process"], row["part"]): row["peak_mb"] for row in rows}
    tensors = {role: peaks[role, _TOTAL] - peaks[role, _LIBRARIES] for role in _TOGETHER}
    sizes, name = _sizes(recipe), recipe.run.name
    dtype = compute_dtype(recipe.engine, recipe.trainer.dtype)
    copies = (tensors["rollout"] - peaks["rollout", "KV cache"]) * _MB / (dtype.itemsize * sizes.num_parameters)
    frozen = getattr(torch, recipe.trainer.dtype).itemsize * sizes.num_frozen
    limit = (4 * _FLOATS_PER_PARAMETER * sizes.num_trained + frozen + _BUCKET_BYTES) / _MB
    trainer = tensors["trainer"] - peaks["trainer", "activations"]
    estimates = {
        role: sum(mb for (process, part), mb in peaks.items() if process == role and _is_tensors(part))
        for role in _TOGETHER
    }
    return [
        _target(f"{name}: rollout process without KV cache (copies of the weights)", copies, _MAX_COPIES),
        _target(f"{name}: trainer without activations (MB)", trainer, limit),
        *(
            _target(f"{name}: error of the dry run, {role}", abs(estimates[role] / tensors[role] - 1), _MAX_ERROR)
            for role in _TOGETHER
        ),
    ]


def _is_tensors(part: str) -> bool:
    return part not in (_TOTAL, _LIBRARIES, _REST)


def _target(name: str, value: float, limit: float) -> Figures:
    return {"name": name, "value": value, "limit": limit, "holds": value <= limit}
