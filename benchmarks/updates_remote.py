"""Delay of a sequence in flight on a generation server, while the server receives new weights over a process group.

The server is a process of its own, `midflight serve`. One sequence is streamed token by token, and the times at which
its tokens arrive here are the measurement. The other sequences are the load.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.models import DEMO_RECIPE, BenchModel
from benchmarks.updates import PROMPT_TOKENS, Update, busy_processes, row_of
from midflight.errors import BenchmarkError
from midflight.generation.client import HTTPGenerator
from midflight.generation.registry import Entry
from midflight.models.loading import load_model, weights_of
from midflight.report.machine import num_cores
from midflight.types import GenerationRequest, RolloutId, SamplingParams
from midflight.weights.process_group_transport import ProcessGroupTransport
from midflight.weights.specs import specs_of

_LINEAGE = "benchmark"
_TIMEOUT_S = 60.0
_PLAIN_TOKENS = 8  # of the streamed sequence before each update; the first ones may wait for prompts
_PREFILLED = 3  # from this token on, no prompt is processed any more


class _Stream:
    """The streamed sequence: a thread notes when each token arrives, and its weight version."""

    def __init__(self, url: str, request: GenerationRequest) -> None:
        self.arrivals: list[tuple[float, int]] = []  # seconds, version
        self._url, self._request, self._is_over = url, request, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, num_tokens: int, version: int) -> None:
        """Wait for this many tokens, and for a token of this version or a newer one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over or self._has(num_tokens, version), _TIMEOUT_S):
                raise BenchmarkError(f"no token of version {version} has arrived within {_TIMEOUT_S:g} s")
            if not self._has(num_tokens, version):
                raise BenchmarkError(f"the sequence ended before version {version}; a larger --new-tokens would work")

    def close(self) -> None:
        """Stop reading; the server then aborts the sequence."""
        self._is_over = True
        self._thread.join()

    def _has(self, num_tokens: int, version: int) -> bool:
        return len(self.arrivals) >= num_tokens and self.arrivals[-1][1] >= version

    def _read(self) -> None:
        body = {
            **asdict(self._request.sampling),
            "prompt": self._request.prompt_token_ids.tolist(),
            "seed": self._request.seed,
            "rollout_id": self._request.rollout_id,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"chunk_tokens": 1},
        }
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=body, trust_env=False, timeout=_TIMEOUT_S
        ) as stream:
            for line in stream.iter_lines():
                if self._is_over:
                    return
                if line.startswith("data: {"):
                    self._note(json.loads(line.removeprefix("data: ")))
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _note(self, event: dict[str, Any]) -> None:
        now_s = time.perf_counter()
        with self._changed:
            for choice in event["choices"]:
                self.arrivals += [(now_s, version) for version in choice["weight_versions"]]
            self._changed.notify_all()


def bench_remote_updates(
    model: BenchModel, dtype: str, *, num_updates: int, sequences: int, new_tokens: int, num_busy: int = 0
) -> dict[str, Any]:
    """Measure `num_updates` updates of a server beside `num_busy` busy processes; return a row.

    Raises: BenchmarkError if the sequences are too short for an update, or the server does not answer.
    """
    torch.set_num_threads(max(1, num_cores() // 2))
    weights = weights_of(load_model(model.directory))
    sets = [weights, {name: tensor * 1.001 for name, tensor in weights.items()}]
    updates: list[Update] = []
    plain_steps_s: list[float] = []
    with serving(model, dtype, new_tokens) as url, TemporaryDirectory() as directory, busy_processes(num_busy):
        entries = {"server": Entry(url, written_at=0)}
        transport = ProcessGroupTransport(Path(directory) / "version", lambda: entries, _LINEAGE, print)
        with closing(transport.sender()) as sender, HTTPGenerator(url, lineage=_LINEAGE, chunk_tokens=64) as client:
            sender.announce(specs_of(weights))
            sender.send(0, weights.items())
            client.adopt(0)
            numbers = itertools.count()
            for version in range(1, num_updates + 1):
                while client.weight_version < version - 1:
                    client.step()
                requests = [_request(model, next(numbers), new_tokens) for _ in range(sequences)]
                client.add(requests[1:])
                with closing(_Stream(url, requests[0])) as stream:
                    stream.wait_for(_PLAIN_TOKENS, 0)
                    sent_s = time.perf_counter()
                    sender.send(version, sets[version % 2].items())
                    client.adopt(version)
                    stream.wait_for(_PLAIN_TOKENS, version)
                    update, before_s = _split(stream.arrivals, sent_s, version)
                updates.append(update)
                plain_steps_s += before_s
                client.abort([request.rollout_id for request in requests[1:]])
    return row_of(model, dtype, "remote", num_busy, sequences, updates, plain_steps_s)


def _split(arrivals: list[tuple[float, int]], sent_s: float, version: int) -> tuple[Update, list[float]]:
    """Return the steps from the send to the first token of the version, and the plain steps before it (seconds)."""
    times_s = [arrived_s for arrived_s, _ in arrivals]
    steps_s = np.diff(times_s)
    first = next(index for index, (arrived_s, _) in enumerate(arrivals) if arrived_s > sent_s)
    last = next(index for index, (_, sampled_by) in enumerate(arrivals) if sampled_by >= version)
    return Update(tuple(steps_s[first - 1 : last].tolist())), steps_s[_PREFILLED : first - 1].tolist()


def _request(model: BenchModel, number: int, new_tokens: int) -> GenerationRequest:
    prompt = np.random.default_rng(number).integers(0, model.vocab_size, PROMPT_TOKENS).astype(np.int32)
    return GenerationRequest(RolloutId(number), prompt, SamplingParams(new_tokens), seed=0)


@contextmanager
def serving(model: BenchModel, dtype: str, new_tokens: int, *overrides: str) -> Iterator[str]:
    """Serve the model with one thread; yields the URL."""
    settings = (
        f"model.path={model.directory}",
        f"engine.dtype={dtype}",
        "engine.threads=1",
        f"engine.max_prompt_tokens={PROMPT_TOKENS}",
        f"sampling.max_tokens={new_tokens}",
        "serve.port=0",
        *overrides,
    )
    command = [sys.executable, "-m", "midflight", "serve", str(DEMO_RECIPE), *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout
        line = process.stdout.readline()
        if not line.startswith("serving at "):
            raise BenchmarkError(f"`{' '.join(command[2:])}` did not start")
        yield line.removeprefix("serving at ").strip()
    finally:
        process.terminate()
        process.communicate()
