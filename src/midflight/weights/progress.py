"""Progress of a broadcast along the chain of engines, and the verdict on the engines that hold it up.

The trainer sends to the first engine, and each engine passes the bytes on to the next one. An engine has room for a few
buckets. Therefore one slow engine soon stops the engines before it, and starves the engines after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Progress:
    """State of an engine's last or running receive; all counts are in bytes."""

    group: str = ""  # address and port of the group's store; empty without a group
    rank: int = 0
    world_size: int = 0
    version: int | None = None
    num_bytes: int = 0
    received: int = 0
    passed_on: int = 0  # to the next engine; the last engine passes nothing on
    taken: int = 0  # by this engine
    has_room: bool = True  # False while nothing can be received until something is passed on or taken
    lost: Literal["", "previous", "next", "group"] = ""  # the connection that failed first


@dataclass(slots=True)
class _Observed:
    progress: Progress = field(default_factory=Progress)  # of the last answer
    answers: bool = True
    received: int = 0  # at least (bytes)
    since_s: float = 0.0  # time of the last change, or of the last moment at which the engine waited for others
    waited_s: float = 0.0  # total time in which all others waited for this engine alone


class ChainWatch:
    """Finds the engines that hold up a broadcast. Pure: times and progress come in, verdicts come out.

    An engine holds up the chain if it neither advances nor waits for another engine for `timeout_s`. So does an engine
    behind the first one, if all others have waited for it alone for `timeout_s` in total.
    """

    def __init__(self, names: Sequence[str], num_bytes: int, timeout_s: float, now_s: float) -> None:
        """Start at time `now_s` with engines that have received nothing; `names` is in the order of the chain."""
        self._names, self._num_bytes, self._timeout_s, self._now_s = names, num_bytes, timeout_s, now_s
        self._observed = {name: _Observed(since_s=now_s) for name in names}

    def first_is_slow(self) -> bool:
        """True if all others have waited for the first engine of several for `timeout_s` in total.

        The reason may also be the trainer's own connection.
        """
        return len(self._names) > 1 and self._observed[self._names[0]].waited_s >= self._timeout_s

    def slowest(self) -> list[str]:
        """The engines that all others have waited for, the one with the longest wait last."""
        waited = [name for name in self._names if self._observed[name].waited_s > 0]
        return sorted(waited, key=lambda name: self._observed[name].waited_s)

    def observe(
        self, now_s: float, offered: int, progress: Mapping[str, Progress | None], done: AbstractSet[str]
    ) -> list[str]:
        """Take the engines' progress at time `now_s`; return the names of engines that must be left out.

        `offered`: bytes that the trainer has for the first engine. `progress`: None for an engine that gives no answer.
        `done`: engines that have reported that they have all weights.
        """
        self._update(now_s, progress, done)
        active = self._active(offered, done)
        for name, observed in self._observed.items():
            if name not in active:
                observed.since_s = now_s
        if len(active) == 1:
            self._observed[active[0]].waited_s += now_s - self._now_s
        self._now_s = now_s
        return [name for name in active if self._is_too_slow(name)]

    def _update(self, now_s: float, progress: Mapping[str, Progress | None], done: AbstractSet[str]) -> None:
        """Store the progress. An engine that gives no answer has received at least as much as the engines after it."""
        behind = 0
        for name in reversed(self._names):
            observed, new = self._observed[name], progress.get(name)
            observed.answers = new is not None
            received = max(observed.received, behind, new.received if new else 0)
            if name in done:
                received = self._num_bytes
            if received > observed.received or (new and new != observed.progress):
                observed.since_s = now_s
            observed.progress = new or observed.progress
            observed.received = behind = received

    def _active(self, offered: int, done: AbstractSet[str]) -> list[str]:
        """The engines that others wait for: all that is missing for them to advance is their own work."""
        active = []
        available, source_answers = min(offered, self._num_bytes), True
        for index, name in enumerate(self._names):
            observed = self._observed[name]
            has_work = observed.received < available or observed.progress.taken < observed.received
            if name in done:
                has_work = False
            elif observed.received >= self._num_bytes:
                has_work = True
            if not observed.answers:
                is_active = has_work or any(other not in done for other in self._names[index + 1 :])
            else:
                is_active = has_work and source_answers and not self._waits_for_next(index)
            if is_active:
                active.append(name)
            available, source_answers = observed.received, observed.answers
        return active

    def _waits_for_next(self, index: int) -> bool:
        """Return True if an engine has no room because the next engine has not received all that this one has taken."""
        progress = self._observed[self._names[index]].progress
        is_last = index + 1 == len(self._names)
        return not is_last and not progress.has_room and progress.passed_on < progress.taken

    def _is_too_slow(self, name: str) -> bool:
        observed = self._observed[name]
        is_late = name != self._names[0] and observed.waited_s >= self._timeout_s
        return is_late or self._now_s - observed.since_s >= self._timeout_s
