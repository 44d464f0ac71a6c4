"""Cost of a weight update for the sequences in flight: many updates under load, on a quiet and on a busy machine.

The engine pulls every version from shared memory while it decodes, as in a run. The load stays at `sequences`: finished
sequences are replaced, but not during an update, so that no prefill counts as a delay.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.embedded import build_embedded_engine
from benchmarks.models import BenchModel
from midflight.engine.pulling import PullingGenerator
from midflight.protocols import Generator, WeightSender
from midflight.report.machine import describe_machine, num_cores
from midflight.types import Completion, FinishReason, GenerationRequest, RolloutId, SamplingParams
from midflight.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from midflight.weights.specs import specs_of

PROMPT_TOKENS = 32
NUM_BUSY = 2  # processes that compete with the engine in the rows "loaded"
_PLAIN_STEPS_BETWEEN = 4  # the first step may prefill, the others only decode
_MAX_DELAY_STEPS, _MAX_STEPS = 1.5, 8


@dataclass(frozen=True, slots=True)
class Update:
    """The steps from `adopt` to the first one that sampled with the new weights, which is included (seconds)."""

    steps_s: tuple[float, ...]

    def longest_delay(self, plain_step_s: float) -> float:
        """Largest extra time before a token of a sequence in flight, in decode steps without an update."""
        return max(0.0, max(self.steps_s) / plain_step_s - 1)


@dataclass
class Load:
    """Load of `sequences` requests in flight, replaced as they finish, with counts of their results."""

    generator: Generator
    vocab_size: int
    sequences: int
    new_tokens: int
    num_aborted: int = 0
    num_finished: int = 0
    versions: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._requests = self._new_requests()
        # Staggered lengths at the start, so that sequences end at different times, as in a run.
        self.generator.add([next(self._requests) for _ in range(self.sequences)])

    def replace_finished(self) -> bool:
        """Replace finished sequences; return True if there were any."""
        missing = self.sequences - self.generator.num_in_flight
        self.generator.add(list(itertools.islice(self._requests, missing)))
        return missing > 0

    def step(self) -> float:
        """Sample one token for every sequence; return the duration (seconds)."""
        started = time.perf_counter()
        completions = self.generator.step()
        elapsed = time.perf_counter() - started
        for completion in completions:
            self._record(completion)
        return elapsed

    def drain(self) -> None:
        """Let every sequence finish."""
        while self.generator.num_in_flight:
            self.step()

    def _record(self, completion: Completion) -> None:
        self.num_aborted += completion.finish_reason is FinishReason.ABORT
        self.num_finished += completion.finish_reason is not FinishReason.ABORT
        self.versions.update(completion.generated.weight_versions.tolist())

    def _new_requests(self) -> Iterator[GenerationRequest]:
        numbers = random.Random(0)
        for index in itertools.count():
            prompt = np.array([numbers.randrange(self.vocab_size) for _ in range(PROMPT_TOKENS)], np.int32)
            staggered = 1 + (index + 1) * self.new_tokens // (self.sequences + 1)
            max_tokens = staggered if index < self.sequences else self.new_tokens
            yield GenerationRequest(RolloutId(index), prompt, SamplingParams(max_tokens), seed=0)


def targets_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the limits on the median delay and on the number of steps, with their values in this row."""
    name = f"{row['model']}, {row['engine']}, {row['load']}"
    figures = [
        (f"{name}: median longest delay (decode steps)", row["longest_delay_steps"]["median"], _MAX_DELAY_STEPS),
    ]
    if row["engine"] == "embedded":  # a remote engine decodes on while its weights travel
        figures.append((f"{name}: longest update (decode steps)", row["steps_per_update"]["max"], _MAX_STEPS))
    return [{"name": name, "value": value, "limit": limit, "holds": value <= limit} for name, value, limit in figures]


def bench_updates(
    model: BenchModel,
    dtype: str,
    *,
    num_updates: int,
    sequences: int,
    new_tokens: int,
    device: str = "cpu",
    num_busy: int = 0,
) -> dict[str, Any]:
    """Measure `num_updates` updates of an embedded engine beside `num_busy` busy processes; return a row."""
    # Half of the cores, as in a run, where the trainer has the other half.
    torch.set_num_threads(max(1, num_cores() // 2))
    with TemporaryDirectory() as directory, busy_processes(num_busy):
        engine = build_embedded_engine(
            model.directory,
            dtype,
            max_num_seqs=sequences,
            max_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=new_tokens,
            device=device,
        )
        path = Path(directory) / "weights"
        with closing(SharedMemorySender(path)) as sender, closing(SharedMemoryReceiver(path)) as receiver:
            load = Load(PullingGenerator(engine.generator, receiver), model.vocab_size, sequences, new_tokens)
            load.step()
            updates, plain_steps_s = run_updates(load, sender, engine.weights, num_updates)
            load.drain()
    return row_of(model, dtype, "embedded", num_busy, sequences, updates, plain_steps_s) | {
        "compute_dtype": engine.compute_dtype,
        "aborted_requests": load.num_aborted,
        "finished_requests": load.num_finished,
        "versions_seen": len(load.versions),
    }


def row_of(
    model: BenchModel,
    dtype: str,
    engine: str,
    num_busy: int,
    sequences: int,
    updates: Sequence[Update],
    plain_steps_s: Sequence[float],
) -> dict[str, Any]:
    """Return the part of a row that all engines have. `plain_steps_s`: decode steps without update or prefill."""
    plain_step_s = statistics.median(plain_steps_s)
    return {
        "machine": describe_machine(),
        "model": model.name,
        "engine": engine,
        "load": f"{num_busy} busy processes" if num_busy else "quiet",
        "dtype": dtype,
        "sequences": sequences,
        "updates": len(updates),
        "median_decode_step_ms": plain_step_s * 1e3,
        "longest_delay_steps": summary([update.longest_delay(plain_step_s) for update in updates]),
        "steps_per_update": summary([len(update.steps_s) for update in updates]),
    }


def run_updates(
    load: Load, sender: WeightSender, weights: Mapping[str, Tensor], num_updates: int
) -> tuple[list[Update], list[float]]:
    """Run the updates; return them, and the durations of decode steps without update or prefill (seconds)."""
    # Two sets of weights in turn, so that every update changes the engine's weights.
    sets = [weights, {name: tensor * 1.001 for name, tensor in weights.items()}]
    sender.announce(specs_of(weights))
    updates, plain_steps_s = [], []
    for version in range(1, num_updates + 1):
        for _ in range(_PLAIN_STEPS_BETWEEN):
            prefilling = load.replace_finished()
            elapsed = load.step()
            if not prefilling:
                plain_steps_s.append(elapsed)
        sender.send(version, sets[version % 2].items())
        load.generator.adopt(version)
        steps_s = []
        while load.generator.weight_version < version:
            steps_s.append(load.step())
        updates.append(Update(tuple(steps_s)))
    return updates, plain_steps_s


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes computing until the end of the block, or of this process."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    return {
        "median": statistics.median(values),
        "p99": float(np.percentile(values, 99)),
        "max": max(values),
    }


def updates_table(result: dict[str, Any]) -> str:
    """Return the rows and the targets as text."""
    lines = []
    for row in result["rows"]:
        delay, steps = row["longest_delay_steps"], row["steps_per_update"]
        lines.append(
            f"{row['model']} {row['dtype']}, {row['engine']}, {row['load']}: longest delay median"
            f" {delay['median']:.2f} steps, p99 {delay['p99']:.2f}; {steps['median']:.0f} steps per update, at most"
            f" {steps['max']:.0f}; a step takes {row['median_decode_step_ms']:.2f} ms"
        )
    failed = [target["name"] for target in result["targets"] if not target["holds"]]
    return "\n".join([*lines, f"targets missed: {'; '.join(failed) or 'none'}"])
