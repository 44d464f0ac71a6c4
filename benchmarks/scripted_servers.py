"""Generation servers without models, in one process: real HTTP, and engines that sample at a fixed rate.

A slot without a request, and a step that the process takes late, are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from threading import Thread
from typing import NamedTuple

import numpy as np
import uvicorn

from benchmarks.models import DEMO_RECIPE
from midflight.config import load_recipe
from midflight.generation.driver import GeneratorDriver
from midflight.generation.request_parsing import ServedModel
from midflight.generation.server import create_app
from midflight.models.loading import load_tokenizer
from midflight.protocols import IncomingWeights
from midflight.run.listening import listen, url_of
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, Int32Array, RolloutId

_TOKEN = 5


class _Running(NamedTuple):
    first_step: int  # number of steps before its first token
    last_step: int
    known: Int32Array  # weight versions of the tokens that came with the request


class ScriptedEngine:
    """Implements LocalEngine: every running request gets one token per `step_s`.

    Every sequence ends after `length` tokens, except the first ones of each slot: they end one after
    the other, so that in the steady state the ends are spread over time.
    """

    def __init__(self, num_slots: int, step_s: float, length: int) -> None:
        self.num_slots, self._step_s, self._length = num_slots, step_s, length
        self._running: dict[RolloutId, _Running] = {}
        self._waiting: dict[RolloutId, GenerationRequest] = {}
        self._ends: defaultdict[int, list[RolloutId]] = defaultdict(list)  # by step
        self._updates: list[tuple[int, int]] = [(0, 0)]  # (first step, version)
        self._num_steps = self._num_started = 0
        self._next_step_s = 0.0
        self.num_sampled = self.num_offered = 0  # tokens; slots of all steps

    @property
    def weight_version(self) -> int:
        return self._updates[-1][1]

    @property
    def num_in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def num_engines(self) -> int:
        return 1

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._waiting.update((request.rollout_id, request) for request in requests)

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        if rollout_id in self._waiting:
            return (self._waiting[rollout_id].generated or GeneratedTokens.none()).part(start)
        running = self._running[rollout_id]
        first_steps, versions = np.array(self._updates, np.int32).T
        steps = np.arange(running.first_step + max(0, start - len(running.known)), self._num_steps)
        sampled = versions[np.searchsorted(first_steps, steps, side="right") - 1]
        all_versions = np.concatenate([running.known[start:], sampled])
        return GeneratedTokens(
            np.full_like(all_versions, _TOKEN), np.zeros(len(all_versions), np.float32), all_versions
        )

    def step(self) -> list[Completion]:
        """Wait for the time of the next step, then sample one token for every running request."""
        now_s = time.monotonic()
        self._next_step_s = max(self._next_step_s + self._step_s, now_s)
        time.sleep(self._next_step_s - now_s)
        while self._waiting and len(self._running) < self.num_slots:
            self._start(self._waiting.pop(next(iter(self._waiting))))
        self._num_steps += 1
        self.num_sampled += len(self._running)
        self.num_offered += self.num_slots
        ended = [rollout_id for rollout_id in self._ends.pop(self._num_steps, ()) if self._is_over(rollout_id)]
        return [self._take(rollout_id, FinishReason.LENGTH) for rollout_id in ended]

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        return [self._take(rollout_id, FinishReason.ABORT) for rollout_id in rollout_ids]

    def stage(self, incoming: IncomingWeights) -> None:
        pass

    def adopt(self, version: int) -> None:
        self._updates.append((self._num_steps, version))

    def _start(self, request: GenerationRequest) -> None:
        known = request.generated.weight_versions if request.generated else np.zeros(0, np.int32)
        self._num_started += 1
        length = self._length
        if self._num_started <= self.num_slots:
            length = max(1, length * self._num_started // self.num_slots)
        last_step = self._num_steps + max(1, length - len(known))
        self._running[request.rollout_id] = _Running(self._num_steps, last_step, known)
        self._ends[last_step].append(request.rollout_id)

    def _is_over(self, rollout_id: RolloutId) -> bool:
        """Return False if the request was aborted, and perhaps added again, before its end."""
        running = self._running.get(rollout_id)
        return running is not None and running.last_step == self._num_steps

    def _take(self, rollout_id: RolloutId, reason: FinishReason) -> Completion:
        generated = self.generated(rollout_id)
        self._running.pop(rollout_id, None)
        self._waiting.pop(rollout_id, None)
        return Completion(rollout_id, generated, reason)


class _EmptyWeights:
    """Implements WeightReceiver: every version is here at once and has no tensors."""

    def __init__(self) -> None:
        self._newest = 0

    def newest_version(self) -> int | None:
        return self._newest

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        self._newest = max(self._newest, newer_than + 1)
        return True

    def receive(self) -> IncomingWeights:
        return IncomingWeights(self._newest, self._newest, ())

    def close(self) -> None:
        pass


class ScriptedServers:
    """Servers in another process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.urls: list[str] = connection.recv()

    def figures(self) -> tuple[int, int, float]:
        """Return the tokens that all engines have sampled, the slots of their steps, and CPU time (seconds)."""
        self._connection.send(None)
        num_tokens, num_slots, cpu_s = self._connection.recv()
        return num_tokens, num_slots, cpu_s


@contextmanager
def scripted_servers(
    num_servers: int, num_slots: int, step_s: float, length: int, cores: Sequence[int]
) -> Iterator[ScriptedServers]:
    """Start servers with a scripted engine each. `cores`: the cores of their process; empty: any."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    engines = (num_servers, num_slots, step_s, length)
    process = spawn.Process(target=_serve, args=(engines, cores, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ScriptedServers(ours)
    finally:
        process.kill()
        process.join()


def _serve(engines_of: tuple[int, int, float, int], cores: Sequence[int], connection: Connection) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    num_servers, num_slots, step_s, length = engines_of
    engines = [ScriptedEngine(num_slots, step_s, length) for _ in range(num_servers)]
    asyncio.run(_serve_all(engines, length, connection))


async def _serve_all(engines: Sequence[ScriptedEngine], length: int, connection: Connection) -> None:
    path = load_recipe(DEMO_RECIPE, []).model.path
    tokenizer = load_tokenizer(path)
    model = ServedModel(
        "scripted", tokenizer, (0,), vocab_size=64, max_length=2 * length, max_tokens=length, max_samples=1
    )
    listeners, servers = [], []
    for engine in engines:
        app = create_app(GeneratorDriver(engine, engine.num_slots), model, (), receiver=_EmptyWeights())
        listeners.append(listen("127.0.0.1", 0))
        servers.append(_Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=30)))
    connection.send([url_of(listener, has_tls=False) for listener in listeners])
    Thread(target=_tell_figures, args=(engines, connection), daemon=True).start()
    await asyncio.gather(*(server.serve([listener]) for server, listener in zip(servers, listeners, strict=True)))


class _Server(uvicorn.Server):
    """Server that leaves signals to its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _tell_figures(engines: Sequence[ScriptedEngine], connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):  # the other process has ended
        while True:
            connection.recv()
            counts = (sum(engine.num_sampled for engine in engines), sum(engine.num_offered for engine in engines))
            connection.send((*counts, time.process_time()))
