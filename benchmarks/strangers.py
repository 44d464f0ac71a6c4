"""Tokens per second of a run on a server that strangers use as well, beside the same run alone.

The server has twice as many slots as the run uses, so that strangers get some. The strangers are processes of their
own. They use the processor, too: `strangers_cpu` is their share of all cores.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.models import BenchModel
from benchmarks.updates_remote import serving
from midflight.generation.client import HTTPGenerator
from midflight.report.machine import describe_machine, num_cores
from midflight.types import FinishReason, GenerationRequest

_NUM_STRANGERS = 3
_LEAST = 0.9  # of the tokens per second alone
_WARM_UP = 0.5  # of a measurement, before it: the strangers' first requests arrive


def strangers_row(
    model: BenchModel,
    sequences: int,
    new_tokens: int,
    seconds: float,
    rounds: int,
    requests: Callable[[Iterator[int]], Iterator[GenerationRequest]],
) -> dict[str, Any]:
    """Measure a run of `sequences` rollouts alone and with strangers, in turns; return a row.

    `over_alone`: median over rounds of the ratio of tokens per second. `ended`: rollouts that were lost or aborted.
    """
    alone, beside, cpu = [], [], []
    with (
        serving(model, "float32", new_tokens, f"serve.num_in_flight={2 * sequences}") as url,
        HTTPGenerator(url) as client,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        run = _Run(client, requests(itertools.count()), sequences)
        run.tokens_per_s(seconds / 4)
        for _ in range(rounds):
            alone.append(run.tokens_per_s(seconds))
            with _strangers(url) as processes:
                run.tokens_per_s(seconds * _WARM_UP)
                before_s, started_s = _cpu_s(processes), time.perf_counter()
                beside.append(run.tokens_per_s(seconds))
                elapsed_s = time.perf_counter() - started_s
                cpu.append((_cpu_s(processes) - before_s) / elapsed_s / num_cores())
            while http.get("/health").json()["in_flight"] > sequences:
                run.tokens_per_s(seconds / 100)
    return {
        "machine": describe_machine(),
        "model": model.name,
        "sequences": sequences,
        "new_tokens": new_tokens,
        "strangers": _NUM_STRANGERS,
        "alone_tokens_per_s": statistics.median(alone),
        "beside_tokens_per_s": statistics.median(beside),
        "over_alone": statistics.median(with_them / without for with_them, without in zip(beside, alone, strict=True)),
        "strangers_cpu": statistics.median(cpu),
        "ended": run.num_ended,
    }


def strangers_line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    return (
        f"{row['model']}, {row['sequences']} in flight, {row['strangers']} strangers looping with n = 128:"
        f" {row['beside_tokens_per_s']:,.0f} tok/s, {row['over_alone']:.2f} of alone, {row['ended']} rollouts ended;"
        f" the strangers use {row['strangers_cpu']:.0%} of the processor"
    )


def strangers_targets(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets for the tokens per second, and for the rollouts that strangers have ended."""
    name = f"{row['model']}, {row['strangers']} strangers looping with n = 128"
    value, ended = row["over_alone"], row["ended"]
    return [
        {"name": f"{name}: tokens/s / alone", "value": value, "limit": _LEAST, "holds": value >= _LEAST},
        {"name": f"{name}: rollouts ended", "value": ended, "limit": 0, "holds": ended == 0},
    ]


class _Run:
    """Keeps the same number of rollouts in flight, also between measurements."""

    def __init__(self, client: HTTPGenerator, requests: Iterator[GenerationRequest], sequences: int) -> None:
        self._client, self._requests, self._sequences = client, requests, sequences
        self.num_ended = 0

    def tokens_per_s(self, seconds: float) -> float:
        """Return the tokens of the rollouts that end within this time, per second."""
        num_tokens, started_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_s) < seconds:
            missing = self._sequences - self._client.num_in_flight
            if missing:
                self._client.add(list(itertools.islice(self._requests, missing)))
            for completion in self._client.step():
                num_tokens += len(completion.generated)
                self.num_ended += completion.finish_reason is FinishReason.ABORT
        return num_tokens / elapsed_s


@contextmanager
def _strangers(url: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        processes = []
        for _ in range(_NUM_STRANGERS):
            process = subprocess.Popen([sys.executable, "-m", "benchmarks.stranger", url])
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def _cpu_s(processes: Sequence[subprocess.Popen[bytes]]) -> float:
    """Return the processor time of processes that run (seconds)."""
    fields = [Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split() for process in processes]
    return sum(int(values[11]) + int(values[12]) for values in fields) / os.sysconf("SC_CLK_TCK")
