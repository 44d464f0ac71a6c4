"""The engines as the sender sees them: asked for their health, gathered into one group, given the newest weights.

waits for      the invited engines, and the transfer of one version
unblocked by   all engines have answered; a failure; an engine that holds up the others for `weights.timeout_s`
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from torch import Tensor

from midflight.weights.buckets import Bucket
from midflight.weights.engine_control import PROTOCOL, EngineControl, EngineError, Health
from midflight.weights.group_forming import form_group
from midflight.weights.group_source import GroupSettings, GroupSource, Outcome, Rules
from midflight.weights.membership import Entry, Membership
from midflight.weights.process_group import Announcement
from midflight.weights.snapshot import streamed

LOOK_S = 1.0  # interval between two looks at the registry
_LEAST_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """Settings of the sender. `snapshot`: send a copy in the background; otherwise `send` waits for the transfer."""

    group: GroupSettings
    lineage: str
    bucket_bytes: int
    snapshot: bool


class Fleet:
    """The engines of one run. Used by one thread at a time, which a lock ensures; `close_group` by any."""

    def __init__(
        self,
        settings: SenderSettings,
        engines: Callable[[], Mapping[str, Entry]],
        note: Callable[[str], object],
        token: str | None,
        wake: Callable[[], object],
    ) -> None:
        """Start without engines. `engines` reads the registry; `wake` is called when an answer has come."""
        self._settings, self._engines, self._note, self._wake = settings, engines, note, wake
        self._membership = Membership(time.monotonic, note)
        self._control = EngineControl(token, settings.group.timeout_s)
        self._answers: queue.SimpleQueue[tuple[str, Entry, Future[Health]]] = queue.SimpleQueue()
        self._group: GroupSource | None = None
        self._members: dict[str, Entry] = {}  # of the group
        self._sent_before = 0  # bytes, by earlier groups
        self._usual_s = 0.0  # duration of the last complete transfer
        self._spare_first = False
        self._slow_first = ""
        self._look_at_s = -math.inf
        self._last_trouble = ""
        self._lock = threading.RLock()

    @property
    def sent_bytes(self) -> int:
        group = self._group
        return self._sent_before + (group.sent_bytes if group else 0)

    def look(self) -> None:
        """Read the registry, take answers, and ask engines for their health. Waits for nothing."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._look_at_s:
                self._look_at_s = now_s + LOOK_S
                self._membership.look(self._engines())
            while not self._answers.empty():
                self._take(*self._answers.get())
            for name, entry in self._membership.to_ask().items():
                self._control.health(entry.url).add_done_callback(
                    lambda answer, name=name, entry=entry: self._put(name, entry, answer)  # type: ignore[misc]
                )

    def next_look_s(self) -> float:
        """Time of the next look that is due without a further event."""
        return min(self._look_at_s, self._membership.next_ask_s())

    def is_lacking(self, version: int, content: int) -> bool:
        """Return True if an engine that can be reached lacks these weights."""
        with self._lock:
            return bool(self._membership.lacking(version, content))

    def relabel(self, version: int, content: int) -> None:
        """Give the engines that have this content the new version."""
        with self._lock:
            entries = self._entries(self._membership.to_relabel(version, content))
            announcement = Announcement(version, (), 1)
            answers = {
                name: self._control.announce(entry.url, announcement, self._settings.lineage, content)
                for name, entry in entries.items()
            }
            for name, answer in answers.items():
                try:
                    answer.result()
                except EngineError as error:
                    self._fail(name, entries[name], error)
                else:
                    self._membership.delivered(name, entries[name], version, content)

    def deliver(
        self,
        announcement: Announcement,
        content: int,
        pieces: Callable[[], Iterable[Tensor | None]],
        is_awaited: Callable[[float], bool] = lambda limit_s: False,
    ) -> bool:
        """Send weights to the engines that lack them; return False if there are none.

        `is_awaited(limit_s)`: a newer version has waited for so long. If other engines wait for it, this transfer is
        given up: at the timeout, or after two usual transfers if all of its engines have failed before.
        """
        with self._lock:
            entries = self._entries(self._membership.lacking(announcement.version, content))
            if not entries:
                return False
            group = self._group_of(entries)
            if group is None:
                return True
            others = self._membership.ready() - entries.keys()
            timeout_s = limit_s = self._settings.group.timeout_s
            if all(map(self._membership.has_failed, entries)):
                limit_s = min(timeout_s, max(_LEAST_LIMIT_S, 2 * self._usual_s))
            counted_s = self._membership.counted_s(entries)
            rules = Rules(timeout_s, self._spare_first, lambda: bool(others) and is_awaited(limit_s), counted_s)
            started_s = time.monotonic()
            try:
                outcome = group.broadcast(announcement, self._settings.lineage, content, pieces(), rules)
            finally:
                self._drop_closed_group()
            if not outcome.failures:
                self._usual_s = time.monotonic() - started_s
            self._settle(outcome, announcement.version, content)
            return True

    def stream(
        self,
        announcement: Announcement,
        content: int,
        buckets: Sequence[Bucket],
        weights: Iterator[tuple[str, Tensor]],
    ) -> None:
        """Send weights while they are produced. Engines may lack them afterwards, and `weights` may have a rest."""
        with self._lock:
            self.look()
            device = self._settings.group.device
            is_begun = False

            def pieces() -> Iterator[Tensor | None]:
                nonlocal is_begun
                is_begun = True
                yield from streamed(buckets, weights, device)

            while not is_begun and self.deliver(announcement, content, pieces):
                pass

    def trouble(self, text: str) -> None:
        """Tell the user about an error that no engine is to blame for, and try again at the next look."""
        if text != self._last_trouble:
            self._last_trouble = text
            self._note(text)

    def close_group(self) -> None:
        """Give up the transfer under way."""
        group = self._group
        if group is not None:
            group.close()

    def close(self) -> None:
        self.close_group()
        self._control.close()

    def _entries(self, names: Iterable[str]) -> dict[str, Entry]:
        return {name: self._membership.entry(name) for name in names}

    def _group_of(self, entries: Mapping[str, Entry]) -> GroupSource | None:
        """The group of exactly these engines; None if it could not be formed."""
        if self._group is not None and self._members == entries and self._group.is_open:
            return self._group
        self.close_group()
        self._drop_closed_group()
        urls = {name: entry.url for name, entry in entries.items()}
        formation = form_group(self._control, urls, self._settings.group)
        for name, error in formation.failures.items():
            self._fail(name, entries[name], error)
        self._group = formation.group
        if formation.group is None:
            return None
        self._members = {name: entries[name] for name in formation.group.urls}
        return formation.group

    def _drop_closed_group(self) -> None:
        if self._group is not None and not self._group.is_open:
            self._sent_before += self._group.sent_bytes
            self._group = None

    def _settle(self, outcome: Outcome, version: int, content: int) -> None:
        """Enter the result of a broadcast into the table."""
        self._last_trouble = ""
        is_complete = outcome.delivered == self._members.keys()
        self._membership.waited_for(outcome.waited_s, outcome.counted_s, outcome.put_last, is_complete)
        for name in outcome.delivered:
            self._membership.delivered(name, self._members[name], version, content)
        for name, error in outcome.failures.items():
            self._fail(name, self._members[name], error)
        if outcome.first_is_slow:
            first = next(iter(self._members))
            # The second engine that is slow in the first place: the trainer's own connection is slow.
            self._spare_first = self._slow_first not in ("", first)
            self._slow_first = first

    def _fail(self, name: str, entry: Entry, error: EngineError) -> None:
        if error.kind == "unfit":
            self._membership.refuse(name, entry, str(error))
        else:
            self._membership.forget_weights(name, entry)
            self._membership.leave_out(name, entry, str(error))

    def _put(self, name: str, entry: Entry, answer: Future[Health]) -> None:
        self._answers.put((name, entry, answer))
        self._wake()

    def _take(self, name: str, entry: Entry, answer: Future[Health]) -> None:
        try:
            health = answer.result()
        except CancelledError:
            return
        except EngineError as error:
            self._fail(name, entry, error)
            return
        if health.protocol != PROTOCOL:
            text = f"it has version {health.protocol} of the weight routes, the trainer {PROTOCOL}; use one release"
            self._membership.refuse(name, entry, text)
        elif self._settings.group.backend not in health.backends:
            text = f"it cannot receive over {self._settings.group.backend}: it has no CUDA device"
            self._membership.refuse(name, entry, text)
        else:
            self._membership.answered(name, entry, *health.newest(self._settings.lineage))
