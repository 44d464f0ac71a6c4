"""Table of the engines of a run and the weights that each one has. Pure: no sockets, no threads, a clock from outside.

An engine of the registry is asked for its health, then gets the newest weights, then every new version. An engine that
cannot be reached or fails is left out, and asked again after a delay that doubles with each failure. An engine that
does not fit is left out until its registry entry changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

# First and last delay between two attempts; the delay doubles after each failure.
BACKOFF_S = (1.0, 60.0)
# Interval between two questions for the health of an engine: a server that was restarted has lost its weights.
ASK_S = 10.0


class Entry(Protocol):
    """Entry of the registry. A server that is restarted writes a new one."""

    @property
    def url(self) -> str: ...

    @property
    def written_at(self) -> int: ...


@dataclass(slots=True)
class _Member:
    entry: Entry
    is_ready: bool = False  # it has answered, and has not failed since
    is_asked: bool = False  # the answer to a question for its health is due, and no weights were delivered since
    ask_at_s: float = -math.inf
    delay_s: float = BACKOFF_S[0]  # until the next attempt after the next failure
    version: int | None = None
    content: int | None = None
    slowness: int = 0
    counted_s: float = 0.0  # waits that count against it since its last complete broadcast, or since it was left out
    noted: str = ""  # the last line that the user has seen


class Membership:
    """The engines. Answers and results name the entry that they are about; about an older entry they are ignored."""

    def __init__(self, clock: Callable[[], float], note: Callable[[str], object]) -> None:
        """Start without engines; `note` shows the user one line."""
        self._clock, self._note = clock, note
        self._members: dict[str, _Member] = {}

    def look(self, entries: Mapping[str, Entry]) -> None:
        """Take the contents of the registry: forget engines that are gone, start anew with changed entries.

        Of several entries with one URL, the first name counts.
        """
        by_url: dict[str, str] = {}
        for name in sorted(entries):
            by_url.setdefault(entries[name].url, name)
        entries = {name: entries[name] for name in by_url.values()}
        for name in self._members.keys() - entries.keys():
            del self._members[name]
        for name, entry in entries.items():
            member = self._members.get(name)
            if member is None or member.entry != entry:
                self._members[name] = _Member(entry)

    def to_ask(self) -> dict[str, Entry]:
        """The engines whose health is due to be asked; they count as asked from now on."""
        due = {name: member for name, member in self._members.items() if member.ask_at_s <= self._clock()}
        for member in due.values():
            member.is_asked, member.ask_at_s = True, math.inf
        return {name: member.entry for name, member in due.items()}

    def next_ask_s(self) -> float:
        """Time of the next question; infinity if none is due without a further event."""
        return min((member.ask_at_s for member in self._members.values()), default=math.inf)

    def answered(self, name: str, entry: Entry, version: int | None, content: int | None) -> None:
        """Take the answer of an engine that is well; `version`: its newest weights of this lineage, if it has any."""
        member = self._get(name, entry)
        if member is None:
            return
        if member.is_asked:
            member.is_ready, member.version, member.content = True, version, content
        if member.is_ready:
            self._ask_later(member, ASK_S)

    def lacking(self, version: int, content: int) -> list[str]:
        """Engines that need the tensors of the newest version, in the order of the chain: slow ones last.

        Engines that have failed since their last weights come only when no other engine lacks the version, so that the
        others do not wait for them again.
        """
        lacking = [
            name
            for name, member in self._members.items()
            if member.is_ready and _is_older(member, version) and member.content != content
        ]
        others = [name for name in lacking if not self.has_failed(name)]
        return sorted(others or lacking, key=lambda name: (self._members[name].slowness, name))

    def has_failed(self, name: str) -> bool:
        """Return True if the engine was left out since it last got weights."""
        return self._members[name].delay_s > BACKOFF_S[0]

    def to_relabel(self, version: int, content: int) -> list[str]:
        """Engines that have the newest tensors under an older version."""
        return [
            name
            for name, member in self._members.items()
            if member.is_ready and _is_older(member, version) and member.content == content
        ]

    def ready(self) -> set[str]:
        """Engines that can receive weights."""
        return {name for name, member in self._members.items() if member.is_ready}

    def entry(self, name: str) -> Entry:
        return self._members[name].entry

    def delivered(self, name: str, entry: Entry, version: int, content: int) -> None:
        """An engine has these weights."""
        member = self._get(name, entry)
        if member is None:
            return
        member.version, member.content = version, content
        member.delay_s, member.is_asked = BACKOFF_S[0], False
        if member.noted:
            member.noted = ""
            self._note(f"engine {name} has new weights again")

    def forget_weights(self, name: str, entry: Entry) -> None:
        """An engine does not have the weights that it was believed to have."""
        member = self._get(name, entry)
        if member is not None:
            member.version = member.content = None

    def leave_out(self, name: str, entry: Entry, why: str) -> None:
        """Leave an engine out until its delay is over. The user sees each reason once."""
        member = self._get(name, entry)
        if member is None:
            return
        self._say(name, member, f"engine {name} is left out: {why}")
        member.is_ready, member.counted_s = False, 0.0
        self._ask_later(member, member.delay_s)
        member.delay_s = min(BACKOFF_S[1], 2 * member.delay_s)

    def refuse(self, name: str, entry: Entry, why: str) -> None:
        """Leave an engine out until its entry in the registry changes."""
        member = self._get(name, entry)
        if member is not None:
            self._say(name, member, f"engine {name} is left out until it is restarted: {why}")
            member.is_ready = False
            self._ask_later(member, math.inf)

    def counted_s(self, names: Iterable[str]) -> dict[str, float]:
        """Waits that count against these engines since their last complete broadcast, or since they were left out."""
        return {name: self._members[name].counted_s for name in names}

    def waited_for(
        self, waited_s: Mapping[str, float], counted_s: Mapping[str, float], put_last: str | None, is_complete: bool
    ) -> None:
        """Remember how long the others have waited for each engine of one chain.

        `put_last`: the engine that the next chain must end with. `is_complete`: all engines of the chain got weights.
        """
        slow = sorted((name for name in waited_s if waited_s[name] > 0), key=lambda name: waited_s[name])
        order = {name: place for place, name in enumerate(slow, 1)}
        for name in waited_s.keys() & self._members.keys():
            member = self._members[name]
            member.counted_s = 0.0 if is_complete else member.counted_s + counted_s[name]
            member.slowness = member.slowness + order[name] if name in order else max(0, member.slowness - 1)
        if put_last in self._members:
            self._members[put_last].slowness = 1 + max(member.slowness for member in self._members.values())

    def _get(self, name: str, entry: Entry) -> _Member | None:
        member = self._members.get(name)
        return member if member is not None and member.entry == entry else None

    def _ask_later(self, member: _Member, delay_s: float) -> None:
        member.is_asked = False
        member.ask_at_s = self._clock() + delay_s

    def _say(self, name: str, member: _Member, text: str) -> None:
        if member.noted != text:
            member.noted = text
            self._note(text)


def _is_older(member: _Member, version: int) -> bool:
    return member.version is None or member.version < version
