"""Load of the rollout process with a fleet of servers: idle share of the engines, and CPU time per token.

The rollout process is real, from the actor to the streams on disk; the servers are real, too, but their engines follow
a clock. A trainer is left out: every batch publishes a new version at once, which all engines adopt in flight.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.models import DEMO_RECIPE
from benchmarks.scripted_servers import ScriptedServers, scripted_servers
from midflight.actor.actor import Actor
from midflight.actor.loop import RolloutLoop
from midflight.actor.partials import PartialBuffer
from midflight.concurrency.background import run_in_background
from midflight.concurrency.event_loop import EventLoopThread
from midflight.config import Recipe, load_recipe
from midflight.generation.client import HTTPGenerator
from midflight.generation.news import News
from midflight.generation.pool import EnginePool, PoolHooks
from midflight.launch.build import build_actor_config, build_grader, recipe_schedule
from midflight.launch.environments import build_all_environments
from midflight.launch.prompts import build_prompts
from midflight.models.loading import load_tokenizer
from midflight.report.machine import describe_machine
from midflight.run.servers import Servers
from midflight.streams.sqlite import SqliteStream
from midflight.tracing.spans import Tracer
from midflight.types import ChosenBatch

_MOST_IDLE = 0.03
_GROUP_SIZE = 8
_PROMPT_TOKENS = 128  # at most
_STREAM_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Fleet:
    """The servers and their load. `length`: tokens of an answer; `step_s`: seconds of a decode step."""

    num_servers: int
    num_slots: int
    length: int
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second if no slot is ever empty."""
        return self.num_servers * self.num_slots / self.step_s


def bench_control(fleet: Fleet, seconds: float, warm_up_s: float, report: Callable[[str], None]) -> dict[str, Any]:
    """Return one row, and the targets."""
    # The rollout process has one core, and the servers have the others.
    first, *others = sorted(os.sched_getaffinity(0))
    with (
        TemporaryDirectory() as directory,
        scripted_servers(fleet.num_servers, fleet.num_slots, fleet.step_s, fleet.length, others) as servers,
        _on_core(first),
    ):
        report(f"{fleet.num_servers} servers are up")
        row = _measure(fleet, servers, Path(directory), seconds, warm_up_s)
    row = {"machine": describe_machine()} | row
    target = {"name": "idle share of the engines", "value": row["idle"], "limit": _MOST_IDLE}
    return {"rows": [row], "targets": [target | {"holds": row["idle"] <= _MOST_IDLE}]}


def control_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = ["servers  slots  length  tokens/s    idle   late  core s/million tokens  core use"]
    lines += [
        f"{row['servers']:7d}  {row['slots']:5d}  {row['length']:6d}  {row['tokens_per_s']:8.0f}  {row['idle']:5.1%}"
        f"  {row['late']:5.1%}  {row['core_s_per_million_tokens']:21.2f}  {row['core_use']:8.0%}"
        for row in rows
    ]
    return "\n".join(lines)


class _InstantTrainer:
    """The stream of batches and the trainer behind it: every batch publishes the next version at once.

    Implements BatchSink and PublishedVersions.
    """

    def __init__(self, path: Path) -> None:
        self._stream = SqliteStream(path, ChosenBatch, _STREAM_CAPACITY)
        self.capacity = self._stream.capacity
        self._version = 0

    def append(self, record: ChosenBatch, timeout_s: float | None = None) -> int | None:
        offset = self._stream.append(record, timeout_s)
        self._stream.read(record.index, timeout_s=0)
        self._stream.trim(record.index)
        self._version += 1
        return offset

    def newest_version(self) -> int:
        return self._version

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        return self._version > newer_than

    def close(self) -> None:
        self._stream.close()


@dataclass(frozen=True, slots=True)
class _Mark:
    """Figures at one time."""

    time_s: float
    cpu_s: float
    num_tokens: int
    num_slots: int  # slots of all steps so far
    servers_cpu_s: float

    num_versions: int


class _Marks:
    """Figures at the beginning and the end of the measurement, taken during the run."""

    def __init__(self, servers: ScriptedServers, trainer: _InstantTrainer, warm_up_s: float, seconds: float) -> None:
        self._servers, self._trainer = servers, trainer
        begin_s = time.monotonic() + warm_up_s
        self._due_s = [begin_s, begin_s + seconds]
        self.passed: list[_Mark] = []

    def have_passed(self) -> bool:
        """Take the figures that are due; return True after the last."""
        now_s = time.monotonic()
        if now_s >= self._due_s[len(self.passed)]:
            cpu_s = time.process_time()
            self.passed.append(_Mark(now_s, cpu_s, *self._servers.figures(), self._trainer.newest_version()))
        return len(self.passed) == len(self._due_s)


def _measure(
    fleet: Fleet, servers: ScriptedServers, directory: Path, seconds: float, warm_up_s: float
) -> dict[str, Any]:
    torch.set_num_threads(1)
    recipe = _recipe(fleet)
    prompts = build_prompts(recipe, load_tokenizer(recipe.model.path))
    environment = build_all_environments(recipe)
    news, loop = News(), EventLoopThread("servers")
    registry = directory / "engines"
    registry.mkdir()
    for number, url in enumerate(servers.urls):
        (registry / f"{number}.json").write_text(json.dumps({"url": url}))
    members = Servers(registry, functools.partial(_connect, loop), news, lambda text: None)
    pool = EnginePool(0, run=run_in_background, news=news, hooks=PoolHooks(members.discover, members.log, members.left))
    with (
        closing(loop),
        closing(pool),
        build_grader(recipe) as grader,
        closing(_InstantTrainer(directory / "batches.sqlite")) as trainer,
        closing(PartialBuffer(directory / "partials.sqlite")) as partials,
        Tracer(directory / "rollout.spans.jsonl", "rollout") as tracer,
    ):
        actor = Actor(build_actor_config(recipe, prompts), pool, environment, grader, prompts)
        rollouts = RolloutLoop(actor, pool, recipe_schedule(recipe), trainer, trainer, tracer, partials)
        while len(pool.names) < fleet.num_servers or pool.num_engines < fleet.num_servers:
            pool.wait_for_member()
            pool.step()
        marks = _Marks(servers, trainer, warm_up_s, seconds)
        rollouts.run(marks.have_passed)
    return _row(fleet, *marks.passed)


def _row(fleet: Fleet, before: _Mark, after: _Mark) -> dict[str, Any]:
    elapsed_s, num_tokens = after.time_s - before.time_s, after.num_tokens - before.num_tokens
    cpu_s = after.cpu_s - before.cpu_s
    num_possible = fleet.tokens_per_s * elapsed_s
    return {
        "servers": fleet.num_servers,
        "slots": fleet.num_slots,
        "length": fleet.length,
        "step_s": fleet.step_s,
        "seconds": elapsed_s,
        "tokens_per_s": num_tokens / elapsed_s,
        "idle": 1 - num_tokens / num_possible,
        "late": 1 - (after.num_slots - before.num_slots) / num_possible,
        "core_s_per_million_tokens": 1e6 * cpu_s / num_tokens,
        "core_use": cpu_s / elapsed_s,
        "servers_core_use": (after.servers_cpu_s - before.servers_cpu_s) / elapsed_s,
        "updates": after.num_versions - before.num_versions,
    }


def _connect(loop: EventLoopThread, url: str, notify: Callable[[], object]) -> HTTPGenerator:
    return HTTPGenerator(url, notify=notify, loop=loop)


def _recipe(fleet: Fleet) -> Recipe:
    return load_recipe(
        DEMO_RECIPE,
        [
            "engine.type=http",
            f"sampling.max_tokens={fleet.length}",
            f"schedule.num_in_flight={fleet.num_slots}",
            f"batch.group_size={_GROUP_SIZE}",
            f"batch.batch_size={_GROUP_SIZE * fleet.num_servers}",
            f"batch.max_tokens={fleet.length + _PROMPT_TOKENS}",
        ],
    )


@contextlib.contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Restrict this process to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
