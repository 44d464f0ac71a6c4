"""Hashes of the batches and weights of a run, under every schedule, to prove that a change alters no run.

The run has one process and a virtual clock, so results do not depend on the machine's speed. The hashes are of float32
results: compare them on one kind of machine.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.loops import run_steps
from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe
from midflight.report.machine import describe_machine
from midflight.types import TrainingBatch

_RECIPE = SHIPPED_RECIPES["cpu_demo"]
_NUM_BATCHES = 50
_NUM_STEPS = 20  # the weights after this number of optimizer steps are hashed
_COMMON = (
    *("run.seed=3", "batch.batch_size=16", "batch.group_size=4", "sampling.max_tokens=60"),
    *("trainer.learning_rate=1e-3", f"trainer.max_steps={_NUM_BATCHES}", "schedule.num_in_flight=24"),
)
_SCHEDULES: dict[str, tuple[str, ...]] = {
    "conventional": ("schedule.type=conventional", "schedule.steps_per_rl_step=4"),
    "pipeline": (),
    "pipeline, max_lag": ("schedule.max_lag=2",),
    "pipeline, drop_oldest": ("schedule.when_full=drop_oldest", "schedule.queue_capacity=16"),
    "pipeline, dynamic sampling": ("batch.dynamic_sampling=true", "loss.type=dapo", "reward.overlong_buffer=16"),
    "april": ("schedule.type=april", "schedule.over_sampling=2", "batch.mask_older_than=4"),
    "bounded": ("schedule.type=bounded", "schedule.max_lag=2"),
    "one_step_off": ("schedule.type=one_step_off",),
}


def digest(
    expect: Annotated[Path | None, typer.Option(help="earlier result to compare each row with")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print hashes of the first batches and of the weights of a fixed recipe, under every schedule."""
    torch.set_num_threads(1)
    console, rows = Console(stderr=True), []
    for name, overrides in _SCHEDULES.items():
        rows.append({"schedule": name, **_digest_of(load_recipe(_RECIPE, _overrides(overrides)))})
        console.print(f"{name}: batches {rows[-1]['batches']}, weights {rows[-1]['weights']}", soft_wrap=True)
    expected = json.loads(expect.read_text())["rows"] if expect else []
    targets = [target for row in expected for target in _targets(row, rows)]
    result = {"machine": describe_machine(), "rows": rows, "targets": targets}
    if as_json:
        print(json.dumps(result, indent=2))
    if not all(target["holds"] for target in targets):
        console.print("changed: " + ", ".join(target["name"] for target in targets if not target["holds"]))
        raise typer.Exit(1)


def _overrides(own: tuple[str, ...]) -> list[str]:
    """Add the common overrides after the schedule's type, which resets its section."""
    return [*own[:1], *_COMMON, *own[1:]] if own and own[0].startswith("schedule.type") else [*_COMMON, *own]


def _targets(expected: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    row = next((row for row in rows if row["schedule"] == expected["schedule"]), {})
    return [
        {
            "name": f"{expected['schedule']}: {key}",
            "value": row.get(key),
            "limit": expected[key],
            "holds": row.get(key) == expected[key],
        }
        for key in ("batches", "weights")
    ]


def _digest_of(recipe: Recipe) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        loops = run_steps(recipe, Path(directory), _NUM_BATCHES)
    batches = loops.stream.appended[:_NUM_BATCHES]
    return {
        "batches": _hash(part for batch in batches for part in _parts_of(batch)),
        "weights": _hash(tensor.numpy() for _, tensor in sorted(loops.weights.sent[_NUM_STEPS].items())),
        "max_lag": max(max(batch.lag_histogram, default=0) for batch in batches),
    }


def _parts_of(batch: TrainingBatch) -> Iterable[np.ndarray[Any, Any]]:
    """All contents of a batch that do not depend on time."""
    yield np.array(batch.group_ids, np.int64)
    yield np.array(sorted(batch.lag_histogram.items()), np.int64)
    yield batch.trained_lengths
    yield batch.has_gradient
    yield batch.generated_lengths
    yield batch.dropped_lengths
    for microbatch in (member for rank in batch.microbatches for member in rank):
        yield microbatch.token_ids
        yield microbatch.position_ids
        yield microbatch.loss_mask
        yield microbatch.behavior_logprobs
        yield microbatch.weight_versions
        yield microbatch.advantages
        yield microbatch.sequence_lengths
        yield microbatch.prefix_starts
        yield microbatch.prefix_lengths
        yield microbatch.rewards
        yield microbatch.first_versions


def _hash(arrays: Iterable[np.ndarray[Any, Any]]) -> str:
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(f"{array.dtype.str}{array.shape}".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()[:16]
