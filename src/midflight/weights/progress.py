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

    group: str = ""  # address and port of the invitation; empty without a group
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
    waited_s: float = 0.0  # time in which all others waited for this engine alone, in this broadcast
    before_s: float = 0.0  # counted against the engine in earlier broadcasts that failed


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a look at a broadcast that is held up.

    `late`: engines to leave out. `put_last`: an engine that a new chain of the same engines must end with.
    `first_is_slow`: the first engine, or the trainer's own connection, holds up the chain.
    """

    late: Sequence[str] = ()
    put_last: str | None = None
    first_is_slow: bool = False


class ChainWatch:
    """Finds the engines that hold up a broadcast. Pure: times and progress come in, verdicts come out.

    An engine holds up the chain if it neither advances nor waits for another engine for `timeout_s`.

    If all others wait for one engine, the reason may also be the engine before it: they share one connection, and the
    wait counts against both. After half of `timeout_s` a new chain separates them. An engine is left out when waits of
    `timeout_s` in total count against it, in this broadcast and in earlier ones that failed.
    """

    def __init__(
        self, names: Sequence[str], num_bytes: int, timeout_s: float, now_s: float, before_s: Mapping[str, float]
    ) -> None:
        """Start at time `now_s` with engines that have received nothing.

        `names`: in the order of the chain. `before_s`: time that counts against an engine since its last complete
        broadcast.
        """
        self._names, self._num_bytes, self._timeout_s, self._now_s = names, num_bytes, timeout_s, now_s
        self._observed = {name: _Observed(since_s=now_s, before_s=before_s.get(name, 0.0)) for name in names}

    def waited_s(self) -> dict[str, float]:
        """Time for which all others have waited for each engine in this broadcast (seconds)."""
        return {name: observed.waited_s for name, observed in self._observed.items()}

    def counted_s(self) -> dict[str, float]:
        """Time that counts against each engine in this broadcast: waits for itself and for the next one (seconds)."""
        waited_s = [*self.waited_s().values(), 0.0]
        return {name: waited_s[index] + waited_s[index + 1] for index, name in enumerate(self._names)}

    def observe(
        self,
        now_s: float,
        offered: int,
        progress: Mapping[str, Progress | None],
        done: AbstractSet[str],
        spare_first: bool = False,
    ) -> Verdict:
        """Take the engines' progress at time `now_s`.

        `offered`: bytes that the trainer has for the first engine. `progress`: None for an engine that gives no answer.
        `done`: engines that have reported that they have all weights. `spare_first`: waits for the first engine have
        no consequence, because the trainer's own connection is slow.
        """
        self._update(now_s, progress, done)
        active = self._active(offered, done)
        for name, observed in self._observed.items():
            if name not in active:
                observed.since_s = now_s
        if len(active) == 1:
            self._observed[active[0]].waited_s += now_s - self._now_s
        self._now_s = now_s
        late = [name for name in active if now_s - self._observed[name].since_s >= self._timeout_s]
        if late or len(active) != 1 or len(self._names) == 1:
            return Verdict(late)
        index = self._names.index(active[0])
        return Verdict() if index == 0 and spare_first else self._judge(index)

    def _judge(self, index: int) -> Verdict:
        """Return the verdict on the engine that all others wait for, and on the engine before it."""
        name, observed = self._names[index], self._observed[self._names[index]]
        counted_s, suspects = self.counted_s(), [name, *self._names[index - 1 : index]]
        total_s = {suspect: self._observed[suspect].before_s + counted_s[suspect] for suspect in suspects}
        worst = max(suspects, key=lambda suspect: total_s[suspect])
        if total_s[worst] >= self._timeout_s:
            return Verdict([worst])
        if observed.waited_s >= self._timeout_s / 2:
            return Verdict(put_last=suspects[-1], first_is_slow=index == 0)
        return Verdict()

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
