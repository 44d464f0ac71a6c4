"""Scripted servers and a scripted broadcast for the fleet on a virtual clock.

The table of engines (Membership) and the verdicts on slow ones (ChainWatch) are the sender's own. Scripted is what the
network does: bytes go from the trainer to the first server of the chain, and from each server to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from midflight.errors import GenerationLostError
from midflight.protocols import NO_VERSION
from midflight.testing.fakes import ScriptedGenerator
from midflight.types import Completion, GenerationRequest, RolloutId
from midflight.weights.membership import Entry as AnyEntry
from midflight.weights.membership import Membership
from midflight.weights.progress import ChainWatch, Progress, Verdict

TICK_S = 0.25
TIMEOUT_S = 5.0  # `weights.timeout_s`
TIMEOUT_TICKS = int(TIMEOUT_S / TICK_S)
LIMIT_TICKS = 4  # of a transfer to servers that have failed before, while the others wait for a newer version
NUM_BYTES = 60  # of all weights
ROOM_BYTES = 20  # that a server keeps until the next one has taken them


@dataclass(frozen=True)
class Entry:
    """Entry of the registry."""

    url: str
    written_at: int


class Server(ScriptedGenerator):
    """A scripted server and the pool's connection to it. `rate`: bytes of weights that it takes in a tick."""

    def __init__(self, name: str, length_of: Callable[[int], int], rate: int, written_at: int) -> None:
        super().__init__(length_of)
        self.name, self.rate, self.entry = name, rate, Entry(name, written_at)
        self.weight_version = self.staged = self.wish = NO_VERSION
        self.hangs_since: int | None = None
        self.is_dead = False
        self.cut_off_until = 0  # tick; until then no weights reach it, but it answers requests
        self.num_tokens = 0

    @property
    def is_healthy(self) -> bool:
        return self.hangs_since is None and not self.is_dead

    def takes_weights(self, now: int) -> bool:
        return self.is_healthy and now >= self.cut_off_until

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        if not self.is_healthy:
            raise GenerationLostError("the server does not answer")
        super().add(requests)

    def step(self) -> list[Completion]:
        if self.is_dead:
            raise GenerationLostError("the server is gone")
        if self.hangs_since is not None:
            return []
        if self.weight_version < self.wish <= self.staged:
            self.weight_version = self.staged
        self.num_tokens += self.num_in_flight
        return super().step()

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """Stop these requests; the ones that an earlier call has taken are ignored, as over HTTP."""
        return super().abort([rollout_id for rollout_id in rollout_ids if rollout_id in self._versions])

    def adopt(self, version: int) -> None:
        self.wish = max(self.wish, version)


@dataclass
class _Link:
    """Bytes that one server of the chain has received and passed on."""

    received: int = 0
    passed_on: int = 0


class Broadcast:
    """One version on its way along a chain of servers."""

    def __init__(self, version: int, chain: Sequence[Server], begun_at: int, counted_s: Mapping[str, float]) -> None:
        self.version, self.chain, self.begun_at = version, chain, begun_at
        self.entries = {server.name: server.entry for server in chain}
        self.watch = ChainWatch(list(self.entries), NUM_BYTES, TIMEOUT_S, begun_at * TICK_S, counted_s)
        self._links = [_Link() for _ in chain]

    def move(self, now: int) -> None:
        """Let every server take bytes from the one before it; the trainer has all of them."""
        takes = [server.takes_weights(now) for server in self.chain]
        budgets = [server.rate if takes[index] else 0 for index, server in enumerate(self.chain)]
        while sum(self._take(index, budgets, takes) for index in range(len(self.chain))):
            pass

    def _take(self, index: int, budgets: list[int], takes: Sequence[bool]) -> int:
        """Let one server take what it can; return the number of bytes."""
        link, is_last = self._links[index], index + 1 == len(self.chain)
        available, room = NUM_BYTES, NUM_BYTES if is_last else link.passed_on + ROOM_BYTES
        if index:
            available = self._links[index - 1].received if takes[index - 1] else 0
        num_bytes = max(0, min(available, room, link.received + budgets[index]) - link.received)
        link.received += num_bytes
        budgets[index] -= num_bytes
        if index:
            self._links[index - 1].passed_on = link.received
        return num_bytes

    def observe(self, now: int, spares_first: bool) -> Verdict:
        progress = {
            server.name: self._progress(index) if server.is_healthy else None for index, server in enumerate(self.chain)
        }
        return self.watch.observe(now * TICK_S, NUM_BYTES, progress, self.done(), spares_first)

    def done(self) -> set[str]:
        return {
            server.name
            for server, link in zip(self.chain, self._links, strict=True)
            if link.received >= NUM_BYTES and server.is_healthy
        }

    def _progress(self, index: int) -> Progress:
        link, is_last = self._links[index], index + 1 == len(self.chain)
        has_room = is_last or link.received < link.passed_on + ROOM_BYTES
        return Progress(
            version=self.version,
            num_bytes=NUM_BYTES,
            received=link.received,
            passed_on=link.passed_on,
            taken=link.received,
            has_room=has_room,
        )


class ScriptedSender:
    """The trainer's sender: it asks, forms a chain of the servers that lack the newest version, and broadcasts."""

    def __init__(self) -> None:
        self.now = 0
        self.membership = Membership(lambda: self.now * TICK_S, lambda text: None)
        self._asked: dict[str, tuple[AnyEntry, int]] = {}  # entry, tick of the question
        self._broadcast: Broadcast | None = None
        self._newest, self._published_at = 0, 0
        self._spares_first, self._slow_first = False, ""
        self._names: set[str] = set()

    def tick(self, now: int, newest: int, servers: Mapping[str, Server]) -> None:
        self.now = now
        if newest > self._newest:
            self._newest, self._published_at = newest, now
        self._names = set(servers)
        self.membership.look({name: server.entry for name, server in servers.items()})
        self._ask(servers)
        if self._broadcast is None:
            lacking = self.membership.lacking(newest, newest)
            if lacking:
                chain = [servers[name] for name in lacking]
                self._broadcast = Broadcast(newest, chain, now, self.membership.counted_s(lacking))
        if self._broadcast is not None:
            self._advance(self._broadcast)

    def _ask(self, servers: Mapping[str, Server]) -> None:
        self._asked |= {name: (entry, self.now) for name, entry in self.membership.to_ask().items()}
        for name, (entry, asked_at) in list(self._asked.items()):
            server = servers.get(name)
            if server is None or server.entry != entry:
                del self._asked[name]
            elif server.is_healthy:
                del self._asked[name]
                version = max(server.staged, server.weight_version)
                known = None if version == NO_VERSION else version
                self.membership.answered(name, entry, known, known)
            elif server.is_dead or self.now - asked_at >= TIMEOUT_TICKS:
                del self._asked[name]
                self._leave_out(name, entry, "no answer")

    def _advance(self, broadcast: Broadcast) -> None:
        broadcast.move(self.now)
        done = broadcast.done()
        failed = {server.name for server in broadcast.chain if server.is_dead}
        verdict = broadcast.observe(self.now, self._spares_first)
        failed |= set(verdict.late)
        is_over = failed or verdict.put_last or len(done) == len(broadcast.chain) or self._is_awaited(broadcast)
        if not is_over:
            return
        if verdict.first_is_slow:
            first = broadcast.chain[0].name
            self._spares_first = self._slow_first not in ("", first)
            self._slow_first = first
        self._broadcast = None
        watch, is_complete = broadcast.watch, len(done) == len(broadcast.chain)
        self.membership.waited_for(watch.waited_s(), watch.counted_s(), verdict.put_last, is_complete)
        for server in broadcast.chain:
            if server.name in done:
                server.staged = max(server.staged, broadcast.version)
                self.membership.delivered(server.name, server.entry, broadcast.version, broadcast.version)
        for name in failed - done:
            self._leave_out(name, broadcast.entries[name], "it holds up the others")

    def _is_awaited(self, broadcast: Broadcast) -> bool:
        """True if other servers have waited for a newer version too long."""
        others = self.membership.ready() - broadcast.entries.keys()
        known = [name for name in broadcast.entries if name in self._names]
        limit = LIMIT_TICKS if all(map(self.membership.has_failed, known)) else TIMEOUT_TICKS
        waited = self.now - self._published_at
        return bool(others) and self._newest > broadcast.version and waited >= limit

    def _leave_out(self, name: str, entry: AnyEntry, why: str) -> None:
        self.membership.forget_weights(name, entry)
        self.membership.leave_out(name, entry, why)
