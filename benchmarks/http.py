"""Tokens per second of an engine behind HTTP, beside the same engine in this process.

Both keep the same number of sequences in flight, with one thread for the engine. The server is a process of its own, so
that HTTP has the other core: the client of a run has one, too.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.embedded import build_embedded_engine
from benchmarks.models import BenchModel
from benchmarks.strangers import strangers_line, strangers_row, strangers_targets
from benchmarks.updates import PROMPT_TOKENS
from benchmarks.updates_remote import serving
from midflight.generation.client import HTTPGenerator
from midflight.protocols import Generator
from midflight.report.machine import describe_machine
from midflight.types import GenerationRequest, RolloutId, SamplingParams

# Least share of the tokens per second in process, by tokens per answer; of the tokens per second with nothing waiting.
_LEAST = {64: 0.85, 7: 0.6}
_LEAST_WHILE_WAITING = 0.9


@dataclass(frozen=True, slots=True)
class HttpLoad:
    """Load of the benchmark: `seconds` per measurement, `rounds` of all measurements in turns."""

    sequences: int
    lengths: tuple[int, ...]
    waiting: tuple[int, ...]  # numbers of streamed requests that wait
    seconds: float
    rounds: int


def bench_http(model: BenchModel, load: HttpLoad, report: Callable[[str], None]) -> dict[str, Any]:
    """Return a row per length of the answers, and the targets.

    `over_in_process`: median over rounds of the ratio of tokens per second.
    """
    torch.set_num_threads(1)
    longest = max(load.lengths)
    engine = build_embedded_engine(
        model.directory, "float32", max_num_seqs=load.sequences, max_prompt_tokens=PROMPT_TOKENS, max_new_tokens=longest
    )
    rows = []
    with (
        serving(model, "float32", longest, f"serve.num_in_flight={load.sequences}") as url,
        HTTPGenerator(url) as client,
    ):
        numbers = itertools.count()
        for length in load.lengths:
            requests = _requests(model, length, numbers)
            for generator in (engine.generator, client):  # allocates, and compiles what is compiled
                _tokens_per_s(generator, requests, load.sequences, load.seconds / 4)
            rates = [
                (
                    _tokens_per_s(engine.generator, requests, load.sequences, load.seconds),
                    _tokens_per_s(client, requests, load.sequences, load.seconds),
                )
                for _ in range(load.rounds)
            ]
            row = {
                "machine": describe_machine(),
                "model": model.name,
                "sequences": load.sequences,
                "new_tokens": length,
                "in_process_tokens_per_s": statistics.median(rate for rate, _ in rates),
                "http_tokens_per_s": statistics.median(rate for _, rate in rates),
                "over_in_process": statistics.median(http / local for local, http in rates),
            }
            rows.append(row)
            report(http_line(row))
        waiting = _waiting_rows(model, load, client, numbers)
    for row in waiting:
        report(waiting_line(row))
    beside = strangers_row(
        model, load.sequences, longest, load.seconds, load.rounds, lambda numbers: _requests(model, longest, numbers)
    )
    report(strangers_line(beside))
    targets = [_target(row) for row in rows if row["new_tokens"] in _LEAST]
    targets += [_waiting_target(row) for row in waiting[1:]]
    return {"rows": [*rows, *waiting, beside], "targets": targets + strangers_targets(beside)}


def _waiting_rows(
    model: BenchModel, load: HttpLoad, client: HTTPGenerator, numbers: Iterator[int]
) -> list[dict[str, Any]]:
    """Keep all slots of the server busy while streamed requests wait for one; return a row per number of them.

    The numbers take turns. `over_none_waiting`: median over rounds.
    """
    requests, counts = _requests(model, max(load.lengths), numbers), (0, *load.waiting)
    rounds = [
        [_tokens_per_s(client, requests, load.sequences + count, load.seconds, drain=False) for count in counts]
        for _ in range(load.rounds)
    ]
    return [
        {
            "machine": describe_machine(),
            "model": model.name,
            "sequences": load.sequences,
            "waiting": count,
            "new_tokens": max(load.lengths),
            "http_tokens_per_s": statistics.median(rates[index] for rates in rounds),
            "over_none_waiting": statistics.median(rates[index] / rates[0] for rates in rounds),
        }
        for index, count in enumerate(counts)
    ]


def waiting_line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    return (
        f"{row['model']}, {row['sequences']} in flight, {row['waiting']} waiting:"
        f" {row['http_tokens_per_s']:,.0f} tok/s, {row['over_none_waiting']:.2f} of none waiting"
    )


def _waiting_target(row: dict[str, Any]) -> dict[str, Any]:
    value, limit = row["over_none_waiting"], _LEAST_WHILE_WAITING
    name = f"{row['model']}, {row['waiting']} streamed requests waiting: tokens/s / with none waiting"
    return {"name": name, "value": value, "limit": limit, "holds": value >= limit}


def http_line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    return (
        f"{row['model']}, {row['sequences']} in flight, {row['new_tokens']} tokens: in process"
        f" {row['in_process_tokens_per_s']:,.0f} tok/s, over HTTP {row['http_tokens_per_s']:,.0f} tok/s,"
        f" ratio {row['over_in_process']:.2f}"
    )


def _target(row: dict[str, Any]) -> dict[str, Any]:
    value, limit = row["over_in_process"], _LEAST[row["new_tokens"]]
    name = f"{row['model']}, {row['new_tokens']} tokens: tokens/s over HTTP / in process"
    return {"name": name, "value": value, "limit": limit, "holds": value >= limit}


def _requests(model: BenchModel, length: int, numbers: Iterator[int]) -> Iterator[GenerationRequest]:
    """Yield requests without end, with prompts that repeat."""
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (64, PROMPT_TOKENS)).astype(np.int32)
    sampling = SamplingParams(length)
    for number in numbers:
        yield GenerationRequest(RolloutId(number), prompts[number % len(prompts)], sampling, seed=0)


def _tokens_per_s(
    generator: Generator,
    requests: Iterator[GenerationRequest],
    sequences: int,
    seconds: float,
    drain: bool = True,
) -> float:
    """Keep `sequences` requests in flight for so long; return the tokens of finished requests per second.

    `drain`: let the last requests finish; otherwise abort them.
    """
    added = list(itertools.islice(requests, sequences))
    generator.add(added)
    generator.step()  # the requests that have ended while others were added do not count
    num_tokens, started_s = 0, time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        num_missing = sequences - generator.num_in_flight
        if num_missing:
            new = list(itertools.islice(requests, num_missing))
            generator.add(new)
            added += new
        num_tokens += sum(len(completion.generated) for completion in generator.step())
    elapsed_s = time.perf_counter() - started_s
    if not drain:
        generator.abort([request.rollout_id for request in added])
    while generator.num_in_flight:
        generator.step()
    return num_tokens / elapsed_s
