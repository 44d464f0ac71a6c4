"""SmolLM2 on two cores: held-out accuracy over training time, beside TRL, and the cost of each variant.

Runs follow one another, and each is a process of its own. Every finished run leaves a file in the output directory;
a benchmark that was cut off skips these runs. The same evaluator measures the models of both systems, off the clock.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.process_memory import PeakMemory
from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import BenchmarkError
from midflight.experiments.runs import RunLength, train
from midflight.launch.build import build_grader
from midflight.metrics.jsonl import json_text, read_metrics
from midflight.models.smollm2 import smollm2_directory
from midflight.report.machine import describe_machine, num_cores
from midflight.run.directory import write_atomically
from midflight.run.evaluation import sampled_accuracy
from midflight.tracing.shares import time_shares
from midflight.trainer.checkpoints import checkpoints_in, load_state

Report = Callable[[str], None]
Figures = dict[str, Any]
SYSTEMS = ("midflight", "trl")
VARIANTS = tuple((recipe, dtype) for recipe in ("smollm2_lora", "smollm2_full") for dtype in ("float32", "bfloat16"))
_RECIPE = SHIPPED_RECIPES["smollm2_lora"]
_CHECKPOINT_EVERY = 24  # optimizer steps between evaluated checkpoints
_NUM_TRL_MODELS = 3
# Groups with equal rewards cost the trainer nothing. Early on few sums are right, so variants reward words.
FREQUENT_REWARD = 'task.rewards=[{type = "regex", options = {pattern = "[a-z]{3}", search = true}}]'
_MIN_GAIN = 0.3
_MAX_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class SmolOptions:
    """Options of the measurement. `steps`, `variant_steps`: optimizer steps of one run, and of one variant."""

    out: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 48
    variant_steps: int = 8
    num_problems: int = 200


def bench_smollm2(options: SmolOptions, report: Report) -> Figures:
    """Return a row per run, a row per variant, and the targets with their values.

    Raises: BenchmarkError or WorkerError if a run fails.
    """
    machine = describe_machine()
    overrides = [f"model.path={smollm2_directory()}", f"eval.num_problems={options.num_problems}"]
    options.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(1, get_context("spawn")) as evaluator:

        def accuracy(model: Path) -> float:
            return evaluator.submit(_accuracy, load_recipe(_RECIPE, overrides), model).result()

        base = _once(options, "base", report, lambda: {"accuracy": accuracy(smollm2_directory())})
        rows = []
        for seed in options.seeds:
            seconds = math.inf  # of TRL's run: as many as midflight's run took
            for system, run in zip(SYSTEMS, (_train_midflight, _train_trl), strict=True):
                name = f"{system}-{seed}"
                limits = Limits(options.steps, seconds)
                measure = _measurement(run, limits, [*overrides, f"run.seed={seed}"], options.out / name, accuracy)
                figures = _once(options, name, report, measure)
                rows.append({"system": system, "seed": seed, "before": base["accuracy"], **figures})
                seconds = figures["seconds"]
    variants = [
        _once(options, f"{recipe}-{dtype}", report, _variant(options, overrides, recipe, dtype))
        for recipe, dtype in VARIANTS
    ]
    return {
        "machine": machine,
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()},
        "recipe": "smollm2_lora",
        "rows": rows,
        "variants": variants,
        "targets": targets(rows),
    }


def targets(rows: list[Figures]) -> list[Figures]:
    """Compare the rows with what the recipe promises."""
    after = {system: [row["after"] for row in rows if row["system"] == system] for system in SYSTEMS}
    own = [row for row in rows if row["system"] == "midflight"]
    gain = min(row["after"] - row["before"] for row in own)
    longest = max(row["seconds"] for row in own)
    lead = sum(after["midflight"]) / len(after["midflight"]) - sum(after["trl"]) / len(after["trl"])
    return [
        {"name": "smallest gain of held-out accuracy", "value": gain, "limit": _MIN_GAIN, "holds": gain >= _MIN_GAIN},
        {
            "name": "longest training (s)",
            "value": longest,
            "limit": _MAX_SECONDS,
            "holds": longest <= _MAX_SECONDS,
        },
        {"name": "mean accuracy minus TRL's", "value": lead, "limit": 0.0, "holds": lead >= 0},
    ]


def _accuracy(recipe: Recipe, model: Path) -> float:
    with build_grader(recipe) as grader:
        measured = sampled_accuracy(recipe, model, grader)
    gc.collect()  # an engine refers to itself, and the next one needs its memory
    return measured


def _once(options: SmolOptions, name: str, report: Report, measure: Callable[[], Figures]) -> Figures:
    """Return the figures of a run that has finished already, or measure and keep them."""
    path = options.out / f"{name}.json"
    if path.is_file():
        figures: Figures = json.loads(path.read_text())
        report(f"{name}: measured before")
        return figures
    load = round(os.getloadavg()[0], 2)
    figures = {**measure(), "load_before": load}
    write_atomically(path, json_text(figures) + "\n")
    report(f"{name}: {_short(figures)}")
    return figures


def _short(figures: Figures) -> str:
    return ", ".join(
        f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
        for key, value in figures.items()
        if isinstance(value, int | float | str)
    )


Models = list[tuple[float, int, Path]]  # seconds of training, optimizer steps, model directory
Accuracy = Callable[[Path], float]


class Limits(NamedTuple):
    """Lengths of a run: optimizer steps of midflight's, seconds of TRL's."""

    steps: int
    seconds: float


System = Callable[[Limits, list[str], Path], tuple[Figures, Models]]


def _measurement(
    run: System, limits: Limits, overrides: list[str], scratch: Path, accuracy: Accuracy
) -> Callable[[], Figures]:
    """Return a measurement of a run: its speed, and the accuracy of every model that it saved."""

    def measure() -> Figures:
        shutil.rmtree(scratch, ignore_errors=True)
        figures, models = run(limits, overrides, scratch)
        curve = [
            {"seconds": round(seconds, 1), "step": step, "accuracy": accuracy(model)} for seconds, step, model in models
        ]
        shutil.rmtree(scratch)
        return {**figures, "after": curve[-1]["accuracy"], "curve": curve}

    return measure


def _train_midflight(limits: Limits, overrides: list[str], scratch: Path) -> tuple[Figures, Models]:
    length = RunLength(steps=limits.steps).overrides
    checkpoints = [f"trainer.checkpoint_every={_CHECKPOINT_EVERY}", "trainer.keep_checkpoints=1000"]
    # Only the evaluations below count; they are off the clock.
    summary = train(_RECIPE, scratch, [*overrides, *length, *checkpoints, "eval.num_problems=0"])
    states = [(load_state(path), path) for path in checkpoints_in(scratch / "checkpoints")]
    models = [(state.wall_s, state.version, path) for state, path in states]
    return _speed(summary["train_wall_s"], summary["steps"], summary["samples"]), models


def _train_trl(limits: Limits, overrides: list[str], scratch: Path) -> tuple[Figures, Models]:
    scratch.mkdir()
    command = [sys.executable, "-m", "benchmarks.trl_smollm2", str(_RECIPE), *overrides, "--out", str(scratch)]
    command += ["--seconds", str(limits.seconds), "--num-saved", str(_NUM_TRL_MODELS), "--threads", str(num_cores())]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise BenchmarkError(f"TRL's run failed: {(process.stderr.strip().splitlines() or ['without a message'])[-1]}")
    result = json.loads(process.stdout.strip().splitlines()[-1])
    models = [(entry["seconds"], int(entry["step"]), Path(entry["path"])) for entry in result["models"]]
    last = result["steps"][-1]
    batch_size = load_recipe(_RECIPE, overrides).batch.batch_size
    return _speed(last["seconds"], int(last["step"]), int(last["step"]) * batch_size), models


def _speed(seconds: float, steps: int, samples: int) -> Figures:
    return {"seconds": seconds, "steps": steps, "samples": samples, "samples_per_s": samples / seconds}


def _variant(options: SmolOptions, overrides: list[str], recipe: str, dtype: str) -> Callable[[], Figures]:
    """Return a measurement of a short run: tokens per second, peak memory and shares of the time."""

    def measure() -> Figures:
        scratch = options.out / f"{recipe}-{dtype}"
        shutil.rmtree(scratch, ignore_errors=True)
        length = RunLength(steps=options.variant_steps).overrides
        variant = [f"trainer.dtype={dtype}", f"engine.dtype={dtype}", FREQUENT_REWARD, "eval.num_problems=0"]
        with PeakMemory(scratch) as memory:
            summary = train(SHIPPED_RECIPES[recipe], scratch, [*overrides, *length, *variant])
        run = RunDirectory(scratch)
        # The first step waits for the first responses.
        steady = list(_steady(run))
        seconds = sum(line["time/step_s"] for line in steady)
        figures = {
            "recipe": recipe,
            "dtype": dtype,
            "seconds_per_step": seconds / len(steady),
            "trained_tokens_per_s": sum(sum(line["length/by_rollout"]) for line in steady) / seconds,
            "generated_tokens_per_s": summary["generated_tokens"] / summary["train_wall_s"],
            "peak_mib": memory.peak_mib,
            "idle": summary["idle"],
            "time_shares": {role: _shares_of_steps(run.spans(role)) for role in ("rollout", "trainer")},
        }
        shutil.rmtree(scratch)
        return figures

    return measure


def _shares_of_steps(spans: Path) -> dict[str, float]:
    """Shares of the time without the checkpoint at the end, which would be a large part of so short a run."""
    shares = time_shares(spans)
    without = 1 - shares.pop("checkpoint", 0.0)
    return {name: share / without for name, share in shares.items()}


def _steady(run: RunDirectory) -> Iterator[Figures]:
    yield from (line for line in read_metrics(run.metrics) if line["version"] > 1)
