"""A fleet on a virtual clock: engines join, leave, die, hang and are slow at any moment, while versions are sent.

The rollout loop, the schedules, the pool, the table of engines of the sender and its verdicts on slow ones are real.
The engines and the network are scripted. A tick is one iteration of the rollout loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midflight.errors import GenerationLostError
from midflight.generation.members import PATIENCE_S
from midflight.generation.pool import EnginePool, PoolHooks
from midflight.protocols import Generator, Schedule
from midflight.schedules.april import AprilSchedule
from midflight.schedules.bounded import BoundedSchedule
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule
from property.scripted_fleet import NUM_BYTES, TICK_S, TIMEOUT_TICKS, ScriptedSender, Server
from property.test_schedules import GROUP_SIZE, Run, World, batch_groups, members, quiet, worlds
from soak import SOAK

__all__ = ["quiet"]  # a fixture

T = TypeVar("T")

PROBE_TICKS = 160  # after which the pool's owner finds out that a server hangs
SETTLED_TICKS = 300  # the longest delay between two attempts of the sender, and an update
CUT_OFF_TICKS = 150
MAX_SERVERS = 4


class Answer(Future[T]):
    """Answer of a server that hangs: comes when the server goes on, or at once if the caller waits for it."""

    def __init__(self, server: Server, function: Callable[[], T]) -> None:
        super().__init__()
        self.server, self._function = server, function

    def come(self) -> None:
        if not self.done():
            try:
                self.set_result(self._function())
            except GenerationLostError as error:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        self.come()
        return super().result(timeout)


@dataclass(frozen=True)
class Event:
    """A change of one server; `which` chooses among the servers that can change."""

    kind: str
    which: int


KINDS = ("join", "join", "leave", "die", "hang", "resume", "resume", "slow", "cut off")
events = st.dictionaries(
    st.integers(0, 200), st.builds(Event, st.sampled_from(KINDS), st.integers(0, MAX_SERVERS)), max_size=40
)


class FleetRun(Run):
    """Run on a fleet whose servers change at the ticks of `events`."""

    def __init__(self, schedule: Schedule, batch_size: int, world: World, events: Mapping[int, Event]) -> None:
        self.events = events
        self.servers: dict[str, Server] = {}
        self.sender = ScriptedSender()
        self.num_joined = 0
        self.pooled_versions: list[int] = []
        self.longest_stall = 0
        self._stall = 0
        self._answers: list[Answer[Any]] = []
        super().__init__(schedule, batch_size, world)

    def make_generator(self) -> Generator:
        hooks = PoolHooks(discover=self.discover)
        return EnginePool(self.receiver.version, hooks=hooks, run=self.call, clock=lambda: self.tick * TICK_S)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a call that may block: a server that hangs answers when it goes on, or when it is given up."""
        server = getattr(getattr(function, "func", None), "__self__", None)
        assert isinstance(server, Server)
        answer = Answer(server, function)
        if server.hangs_since is None:
            answer.come()
        else:
            self._answers.append(answer)
        return answer

    def discover(self, pool: EnginePool) -> None:
        """Do what the registry and the probes do for the pool, and what the user does to the servers."""
        now = self.tick
        if event := self.events.get(now):
            self.change(event, pool)
        if not self.servers:
            self.join(pool)
        for name, server in list(self.servers.items()):
            given_up = server.hangs_since is not None and now - server.hangs_since > PROBE_TICKS
            if given_up:
                pool.lose(name, "no answer")
            if given_up or server.is_dead or name not in pool.names:
                del self.servers[name]
        for answer in list(self._answers):
            if answer.server.is_healthy or answer.server not in self.servers.values():
                self._answers.remove(answer)
                answer.come()
        self.sender.tick(now, self.receiver.version, self.servers)

    def change(self, event: Event, pool: EnginePool) -> None:
        if event.kind == "join" and len(self.servers) < MAX_SERVERS:
            self.join(pool)
        candidates = {
            name: server for name, server in self.servers.items() if server.is_healthy == (event.kind != "resume")
        }
        if not candidates:
            return
        name = sorted(candidates)[event.which % len(candidates)]
        server = candidates[name]
        if event.kind == "leave":
            pool.leave(name, "asked to leave")
        elif event.kind == "die":
            server.is_dead = True
        elif event.kind == "hang":
            server.hangs_since = self.tick
        elif event.kind == "resume":
            server.hangs_since = None
        elif event.kind == "slow":
            server.rate = 1
        elif event.kind == "cut off":
            server.cut_off_until = self.tick + CUT_OFF_TICKS

    def join(self, pool: EnginePool) -> None:
        self.num_joined += 1
        name = f"{self.num_joined:04}"
        rate = NUM_BYTES // (1 + self.world.update_ticks * (self.num_joined % 3))
        self.servers[name] = Server(name, self.world.length_of, rate, written_at=self.tick)
        pool.join(name, self.servers[name])

    def iteration(self) -> None:
        num_tokens, healthy = self.total_tokens(), self.healthy()
        is_training = len(self.batches) > self.receiver.version
        super().iteration()
        self.pooled_versions.append(self.generator.weight_version)
        # Nothing moves: no token, no training, no grade under way, although a server could sample.
        waits = not is_training and self.total_tokens() == num_tokens and not self.actor.num_ungraded
        self._stall = self._stall + 1 if waits and healthy & self.healthy() else 0
        self.longest_stall = max(self.longest_stall, self._stall)

    def healthy(self) -> set[str]:
        return {name for name, server in self.servers.items() if server.is_healthy}

    def total_tokens(self) -> int:
        return sum(server.num_tokens for server in self.servers.values())

    def check_versions(self) -> None:
        """Check that no version decreased, and that every server gets the newest one once all faults are over."""
        assert self.pooled_versions == sorted(self.pooled_versions), "the version of the pool decreased"
        self.events = {}
        for server in self.servers.values():
            server.hangs_since, server.rate, server.cut_off_until = None, NUM_BYTES, 0
        newest, begun_at = self.receiver.version, self.tick
        while any(server.weight_version != newest for server in self.servers.values()):
            assert self.tick - begun_at < SETTLED_TICKS, "a server never gets the newest version"
            self.generator.adopt(newest)
            self.generator.step()
            self.tick += 1


@pytest.mark.slow
@given(worlds, st.integers(0, 4), batch_groups, st.integers(1, 5), events)
@settings(max_examples=30 * SOAK)
def test_lag_bounds_hold_while_servers_fail(
    world: World, max_lag: int, num_groups: int, num_in_flight: int, events: dict[int, Event]
) -> None:
    batch_size = num_groups * GROUP_SIZE
    schedules: list[Schedule] = [
        PipelineSchedule(batch_size, num_in_flight, batch_size, max_lag),
        BoundedSchedule(batch_size, max_lag),
        BoundedSchedule(batch_size, max_lag, "boundary"),
        ConventionalSchedule(batch_size, max_lag + 1),
    ]
    for schedule in schedules:
        run = FleetRun(schedule, batch_size, world, events).finish()
        assert max(run.lags()) <= max_lag
        run.check_accounts()
        run.check_versions()
    assert all(len(set(rollout.generated.weight_versions.tolist())) == 1 for rollout in members(run.trained))


@pytest.mark.slow
@given(worlds, batch_groups, st.none() | st.integers(1, 3), events)
@settings(max_examples=30 * SOAK)
def test_april_bounds_versions_while_servers_fail(
    world: World, num_groups: int, max_versions: int | None, events: dict[int, Event]
) -> None:
    batch_size = num_groups * GROUP_SIZE
    run = FleetRun(AprilSchedule(batch_size, GROUP_SIZE, 2.0, max_versions), batch_size, world, events).finish()
    run.check_accounts()
    run.check_versions()
    if max_versions is not None:
        versions = [
            set(rollout.generated.weight_versions.tolist()) for batch in run.batches for rollout in members(batch)
        ]
        assert max(map(len, versions)) <= max_versions


three_servers = {1: Event("join", 0), 2: Event("join", 0)}
quick_steps = World(lengths=[5], train_ticks=[3], grade_ticks=[0])
slow_links = World(lengths=[3, 3, 40], train_ticks=[3], grade_ticks=[0], update_ticks=4)
# Longest wait of the fleet for one server. The requests of a server that hangs are in its hands until the probe fails.
SLACK_TICKS = 6 + int(PATIENCE_S / TICK_S)  # the sender's rounds, and the pool's patience with the server
WAIT_TICKS = {
    "cut off": TIMEOUT_TICKS + SLACK_TICKS,
    "slow": TIMEOUT_TICKS + SLACK_TICKS,
    "hang": max(TIMEOUT_TICKS, PROBE_TICKS) + SLACK_TICKS,
    "die": SLACK_TICKS,
}
MAX_CHAINS = 3  # made anew after one fault, before the others have their weights
# Links so slow that a server needs more than the timeout for a version are a fault of their own.
quick_worlds = worlds.map(lambda world: replace(world, update_ticks=min(world.update_ticks, 4)))


@pytest.mark.slow
@example(world=quick_steps, max_lag=1, num_groups=1, faults=[Event("cut off", 0)], at=40)
@example(world=quick_steps, max_lag=1, num_groups=1, faults=[Event("cut off", 0), Event("cut off", 1)], at=40)
@example(world=quick_steps, max_lag=1, num_groups=1, faults=[Event("slow", 2), Event("hang", 1)], at=41)
# Cut off between two servers: both of them, and the connection, may be the reason.
@example(world=slow_links, max_lag=0, num_groups=2, faults=[Event("cut off", 2)], at=20)
@example(world=slow_links, max_lag=1, num_groups=2, faults=[Event("cut off", 2)], at=54)
@given(
    quick_worlds,
    st.integers(0, 4),
    batch_groups,
    st.lists(st.builds(Event, st.sampled_from(sorted(WAIT_TICKS)), st.integers(0, 2)), min_size=1, max_size=2),
    st.integers(5, 120),
)
@settings(max_examples=40 * SOAK)
def test_no_server_makes_the_fleet_wait_for_longer_than_the_timeout(
    world: World, max_lag: int, num_groups: int, faults: list[Event], at: int
) -> None:
    """One or two of three servers fail at the same time."""
    batch_size = num_groups * GROUP_SIZE
    events = three_servers | {at + index: fault for index, fault in enumerate(faults)}
    run = FleetRun(PipelineSchedule(batch_size, 4, batch_size, max_lag), batch_size, world, events)
    transfer_ticks = 1 + 2 * world.update_ticks  # of the slowest server
    limit = sum(WAIT_TICKS[fault.kind] + MAX_CHAINS * transfer_ticks for fault in faults)
    assert run.finish().longest_stall <= limit
    run.check_accounts()


def test_pipeline_fills_every_engine() -> None:
    world = World(lengths=[40], train_ticks=[1], grade_ticks=[0])
    joins = {5: Event("join", 0), 10: Event("join", 0)}
    run = FleetRun(PipelineSchedule(2, num_in_flight=3, queue_capacity=64), 2, world, joins)
    for _ in range(30):
        run.iteration()
    assert run.actor.ledger.num_in_flight == 3 * 3
    assert min(each.num_in_flight for each in run.servers.values()) >= 2


def test_rollouts_of_a_dead_server_go_on_elsewhere() -> None:
    world = World(lengths=[60], train_ticks=[1], grade_ticks=[0])
    events = {2: Event("join", 0), 30: Event("die", 0)}
    run = FleetRun(PipelineSchedule(2, num_in_flight=3, queue_capacity=64), 2, world, events)
    while run.tick <= 30:
        run.iteration()
    carried = [rollout for rollout in run.actor.open_rollouts() if len(run.actor.tokens_of(rollout, 0))]
    run.finish().check_accounts()
    assert carried
