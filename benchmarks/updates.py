"""Cost of a weight update for the sequences in flight: many updates under load, each between two tokens.

The load stays at `sequences`: finished sequences are replaced, but not while an update is pending, so that no prefill
counts as a pause.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.embedded import build_embedded_engine
from benchmarks.models import BenchModel
from midflight.protocols import Generator
from midflight.report.machine import describe_machine, num_cores
from midflight.types import Completion, FinishReason, GenerationRequest, RolloutId, SamplingParams

PROMPT_TOKENS = 32
_PLAIN_STEPS_BETWEEN = 2  # the first step may prefill, the second only decodes


@dataclass(frozen=True, slots=True)
class Update:
    """One `update_weights` call, and the steps until the engine used the new weights. Units: seconds."""

    call_s: float
    pending_steps_s: tuple[float, ...]

    def delays(self, plain_step_s: float) -> list[float]:
        """Extra time before each next token, compared with a step without an update; never negative (seconds)."""
        if not self.pending_steps_s:
            return [self.call_s]
        first, *rest = self.pending_steps_s
        steps = [self.call_s + first, *rest]
        return [max(0.0, step - plain_step_s) for step in steps]


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


def bench_updates(
    model: BenchModel, dtype: str, *, num_updates: int, sequences: int, new_tokens: int, device: str = "cpu"
) -> dict[str, Any]:
    """Measure `num_updates` updates: the longest single delay of each, and the sum of its delays (milliseconds)."""
    machine = describe_machine()
    torch.set_num_threads(num_cores())
    engine = build_embedded_engine(
        model.directory,
        dtype,
        max_num_seqs=sequences,
        max_prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=new_tokens,
        device=device,
    )
    load = Load(engine.generator, model.vocab_size, sequences, new_tokens)
    load.step()
    updates, plain_steps_s = run_updates(load, engine.weights, num_updates)
    load.drain()
    plain_step_s = statistics.median(plain_steps_s)
    delays = [update.delays(plain_step_s) for update in updates]
    return {
        "machine": machine,
        "model": model.name,
        "dtype": dtype,
        "compute_dtype": engine.compute_dtype,
        "sequences": sequences,
        "updates": num_updates,
        "pause_ms": milliseconds([max(own) for own in delays]),
        "total_ms": milliseconds([sum(own) for own in delays]),
        "median_decode_step_ms": plain_step_s * 1e3,
        "median_steps_pending": statistics.median(len(update.pending_steps_s) for update in updates),
        "aborted_requests": load.num_aborted,
        "finished_requests": load.num_finished,
        "versions_seen": len(load.versions),
    }


def run_updates(load: Load, weights: Mapping[str, Tensor], num_updates: int) -> tuple[list[Update], list[float]]:
    """Run the updates; return them, and the durations of decode steps without update or prefill (seconds)."""
    generator = load.generator
    # Two sets of weights in turn, so that every update changes the engine's weights.
    sets = [weights, {name: tensor * 1.001 for name, tensor in weights.items()}]
    updates, plain_steps_s = [], []
    for version in range(1, num_updates + 1):
        for _ in range(_PLAIN_STEPS_BETWEEN):
            prefilling = load.replace_finished()
            elapsed = load.step()
            if not prefilling:
                plain_steps_s.append(elapsed)
        started = time.perf_counter()
        generator.update_weights(version, sets[version % 2])
        call_s = time.perf_counter() - started
        pending_steps_s = []
        while generator.update_pending:
            pending_steps_s.append(load.step())
        updates.append(Update(call_s, tuple(pending_steps_s)))
    return updates, plain_steps_s


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum, in milliseconds."""
    return {
        "median": statistics.median(seconds) * 1e3,
        "p99": float(np.percentile(seconds, 99)) * 1e3,
        "max": max(seconds) * 1e3,
    }
