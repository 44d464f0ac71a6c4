"""The trainer's end of a process group: sends weights along the chain of its engines, and finds what stops them.

sending thread    waits for: the first engine to take each piece
watching thread   waits for: every engine's answer
                  unblocked by: all answers; a failed engine or connection; an engine that holds up the others too long

Any error closes the group on all ranks at once. The group is then made anew with the engines that are left.
"""

from __future__ import annotations

import enum
import queue
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from midflight.concurrency.background import run_in_background
from midflight.weights.buckets import plan_buckets
from midflight.weights.engine_control import EngineControl, EngineError, engine_error
from midflight.weights.group_links import Links, Transfer
from midflight.weights.process_group import NUM_AHEAD, Announcement, Backend
from midflight.weights.progress import ChainWatch, Progress

_POLL_S = 1.0  # interval at which engines are asked for their progress


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of every group. `address`: of this machine, as the engines reach it; None: found by route."""

    backend: Backend
    address: str | None
    timeout_s: float
    device: torch.device


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of one broadcast.

    `counted_s`: waits that count against an engine since its last complete broadcast. `is_awaited`: other engines have
    waited for the end of this broadcast too long.
    """

    timeout_s: float
    spare_first: bool  # the trainer's own connection may be slow: never close a group because of its first engine
    is_awaited: Callable[[], bool]
    counted_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """Result of forming a group or of a broadcast, by engine. Engines in neither set may be tried again at once."""

    delivered: set[str] = field(default_factory=set)
    failures: dict[str, EngineError] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)  # for which all others have waited for an engine
    counted_s: dict[str, float] = field(default_factory=dict)  # of such waits, against an engine
    put_last: str | None = None  # the engine that the next chain must end with
    first_is_slow: bool = False  # the first engine of the chain, or the trainer's own connection


class GroupSource:
    """A complete group. `urls`: its engines by name, in the order of the chain.

    `connections`: to the engines, without messages; their end tells an engine that the group is closed.
    """

    def __init__(
        self,
        control: EngineControl,
        name: str,
        urls: Mapping[str, str],
        links: Links,
        connections: Sequence[socket.socket],
    ) -> None:
        self.name, self.urls = name, dict(urls)
        self.sent_bytes = 0  # to the first engine
        self._control = control
        self._links: Links | None = links
        self._connections = connections

    @property
    def is_open(self) -> bool:
        return self._links is not None

    def broadcast(
        self, announcement: Announcement, lineage: str, content: int, pieces: Iterable[Tensor | None], rules: Rules
    ) -> Outcome:
        """Send the weights to all engines; return when every engine has answered or the group has failed.

        `pieces`: None asks to finish all transfers so far, because the memory will be used again.
        Raises: an error of `pieces`; the group is then closed.
        """
        run = _Run(self, announcement, lineage, content, rules)
        watching = run_in_background(run.watch)
        try:
            self._feed(pieces, run)
        except _SendingError:
            run.events.put(_Event.FAILED)
        except BaseException:
            run.events.put(_Event.CANCELED)
            watching.result()
            raise
        return watching.result()

    def close(self) -> None:
        """Leave the group; all other ranks notice at once. Callable from any thread."""
        links, self._links = self._links, None
        if links is not None:
            links.abort()
        for connection in self._connections:
            connection.close()

    def _feed(self, pieces: Iterable[Tensor | None], run: _Run) -> None:
        """Send the pieces. Raises: _SendingError if the first engine does not take them."""
        ahead: deque[tuple[Transfer, int]] = deque()
        for piece in pieces:
            if piece is None:
                self._finish(ahead, keep=0)
            else:
                self._finish(ahead, keep=NUM_AHEAD - 1)
                run.offered += len(piece)
                ahead.append((self._start(piece), len(piece)))
        self._finish(ahead, keep=0)

    def _start(self, piece: Tensor) -> Transfer:
        links = self._links
        if links is None:
            raise _SendingError
        try:
            return links.send(piece)
        except RuntimeError as error:
            raise _SendingError from error

    def _finish(self, ahead: deque[tuple[Transfer, int]], keep: int) -> None:
        while len(ahead) > keep:
            transfer, num_bytes = ahead.popleft()
            try:
                transfer.wait()
            except RuntimeError as error:
                raise _SendingError from error
            self.sent_bytes += num_bytes


class _SendingError(Exception):
    """The connection to the first engine failed."""


class _Event(enum.Enum):
    FAILED = enum.auto()  # sending failed
    CANCELED = enum.auto()  # the weights could not be produced


class _Run:
    """One broadcast as the trainer watches it."""

    def __init__(
        self, source: GroupSource, announcement: Announcement, lineage: str, content: int, rules: Rules
    ) -> None:
        self._source, self._version, self._rules = source, announcement.version, rules
        self.offered = 0  # bytes that the first engine can have; written by the sending thread
        self.events: queue.SimpleQueue[str | _Event] = queue.SimpleQueue()  # a name: this engine has answered
        buckets = plan_buckets(announcement.specs, announcement.bucket_bytes)
        num_bytes = sum(bucket.num_bytes for bucket in buckets)
        self._chain = ChainWatch(list(source.urls), num_bytes, rules.timeout_s, time.monotonic(), rules.counted_s)
        self._outcome = Outcome()
        self._answers: dict[str, Future[Any]] = {}
        for name, url in source.urls.items():
            self._answers[name] = source._control.announce(url, announcement, lineage, content)
            self._answers[name].add_done_callback(lambda _, name=name: self.events.put(name))  # type: ignore[misc]

    def watch(self) -> Outcome:
        """Wait for all answers or the first failure. A failure closes the group, which ends the sending as well."""
        while len(self._outcome.delivered) < len(self._answers) and not self._is_over():
            try:
                event = self.events.get(timeout=min(_POLL_S, self._rules.timeout_s / 8))
            except queue.Empty:
                self._find_late()
                continue
            if event is _Event.CANCELED:
                break
            if isinstance(event, str) and self._answers[event].exception() is None:
                self._outcome.delivered.add(event)
            else:
                self._diagnose()
        if len(self._outcome.delivered) < len(self._answers):
            self._source.close()
            for answer in self._answers.values():
                answer.cancel()
        self._outcome.waited_s, self._outcome.counted_s = self._chain.waited_s(), self._chain.counted_s()
        return self._outcome

    def _find_late(self) -> None:
        delivered, limit = self._outcome.delivered, f"weights.timeout_s = {self._rules.timeout_s:g} s"
        progress = self._progress()
        verdict = self._chain.observe(time.monotonic(), self.offered, progress, delivered, self._rules.spare_first)
        for name in verdict.late:
            self._fail_late(name, f"it held up version {self._version} for {limit}")
        self._outcome.put_last, self._outcome.first_is_slow = verdict.put_last, verdict.first_is_slow
        if self._rules.is_awaited():
            for name in self._answers.keys() - delivered:
                self._fail_late(name, f"the others waited {limit} for it to receive version {self._version}")

    def _fail_late(self, name: str, text: str) -> None:
        self._outcome.failures[name] = EngineError(text, "failed")

    def _is_over(self) -> bool:
        return bool(self._outcome.failures) or self._outcome.put_last is not None

    def _diagnose(self) -> None:
        """Find the engines that made the broadcast fail; the others failed because of them."""
        progress = self._progress()  # also gives answers of other engines the time to arrive
        failed: dict[str, EngineError] = {}
        for name, answer in self._answers.items():
            if not answer.done():
                continue
            error = answer.exception()
            if error is None:
                self._outcome.delivered.add(name)
            else:
                failed[name] = engine_error(error)
        causes = {name: error for name, error in failed.items() if error.kind != "failed"}
        silent = [name for name, state in progress.items() if state is None and name not in self._outcome.delivered]
        for name in silent if not causes else ():
            causes[name] = EngineError("it gives no answer", "gone")
        if not causes:
            name = self._behind_lost_link(progress, failed)
            causes[name] = failed.get(name) or EngineError("the connection to it failed", "failed")
        self._outcome.failures |= causes

    def _behind_lost_link(self, progress: Mapping[str, Progress | None], failed: Mapping[str, EngineError]) -> str:
        """The engine that lost the engine before it, while that one did not lose its own; or the first that failed."""
        before = "next"
        for name, state in progress.items():
            lost = state.lost if state is not None and state.version == self._version else ""
            if lost == "previous" and before != "previous":
                return name
            before = lost
        waiting = [name for name in self._answers if name not in self._outcome.delivered]
        return next((name for name in waiting if name in failed), waiting[0])

    def _progress(self) -> dict[str, Progress | None]:
        """Ask all engines at once; None for an engine that gives no answer."""
        source = self._source
        asked = {name: source._control.progress(url) for name, url in source.urls.items()}
        progress: dict[str, Progress | None] = {}
        for name, future in asked.items():
            try:
                state = future.result()
            except EngineError:
                progress[name] = None
            else:
                is_this = state.group == source.name and state.version == self._version
                progress[name] = state if is_this else Progress()
        return progress
