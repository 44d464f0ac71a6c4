"""The members of a pool and the versions they sample with.

consumes       the weight version of each member, a field
waits for      nothing

Invariants: a member samples only while its weights are no older than `weight_version`, which never decreases. A member
that joins, or adopts new weights much later than the other members, does not sample until it has caught up. The pool
does not wait for it and does not drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from midflight.protocols import NO_VERSION, Generator
from midflight.types import Completion, GenerationRequest, RolloutId

T = TypeVar("T")

# A member is late if most members have had a version that it lacks for this long, or some of them twice as long. The
# sender of a process group hands a version to all members at about the same time.
PATIENCE_S = 1.5


class Runner(Protocol):
    """Executes a call that may block: `run_in_background` or `run_at_once`."""

    def __call__(self, function: Callable[[], T], /) -> Future[T]: ...


@dataclass(slots=True, eq=False)
class Member:
    """One engine of a pool."""

    name: str
    generator: Generator
    hang_up: Callable[[], object]
    num_slots: int | None = None  # sequences that it generates at a time; None: not known
    version: int = NO_VERSION  # of its weights, as of the last `Members.read_versions`
    samples: bool = False  # False: it is joining, or was set aside because it is late
    has_joined: bool = False
    was_behind: bool = False  # the log has said that it must catch up
    has_served: bool = False  # it has completed a request
    leave_reason: str | None = None  # set by `Members.retire`: it gets no more requests and leaves after the last one
    recall: Future[list[Completion]] | None = None  # the abort that takes its requests back, after it was set aside
    requests: dict[RolloutId, GenerationRequest] = field(default_factory=dict)


@dataclass(slots=True)
class _Wish:
    """A version that the members were asked to adopt, and when sampling members first had it."""

    version: int
    one_has_it_s: float | None = None
    most_have_it_s: float | None = None


class Members:
    """Members by name.

    `weight_version`: oldest version that any member samples with; it stays while no member samples.
    `newest_version`: the version that the members were last asked to adopt.
    """

    def __init__(self, version: int, clock: Callable[[], float], patience_s: float = PATIENCE_S) -> None:
        """Create an empty set of members.

        `version`: members sample with this version or a newer one. `patience_s`: time for which most members have a
        version before the others are late.
        """
        self.weight_version = self.newest_version = version
        self._by_name: dict[str, Member] = {}
        self._clock, self._patience_s = clock, patience_s
        self._wishes: list[_Wish] = []  # versions that a sampling member may lack
        self._open: list[Member] | None = None  # None: to be counted again

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_name.values()))

    def __contains__(self, member: Member) -> bool:
        return self._by_name.get(member.name) is member

    def get(self, name: str) -> Member | None:
        return self._by_name.get(name)

    def of(self, names: Iterable[str]) -> list[Member]:
        """Return the members with these names, in the order in which they joined; other names are ignored."""
        wanted = set(names)
        if len(wanted) < 2:
            return [self._by_name[name] for name in wanted if name in self._by_name]
        return [member for name, member in self._by_name.items() if name in wanted]

    def add(self, member: Member) -> None:
        """Add a member and ask it to adopt the newest version."""
        assert member.name not in self._by_name
        self._by_name[member.name] = member
        member.generator.adopt(self.newest_version)

    def remove(self, member: Member) -> bool:
        """Remove a member; return False if it was removed before."""
        self._open = None
        return self._by_name.pop(member.name, None) is not None

    def retire(self, member: Member, reason: str) -> None:
        """Give a member no more requests, so that it leaves after the last one."""
        member.leave_reason = reason
        self._open = None

    @property
    def open(self) -> Sequence[Member]:
        """The members that accept requests."""
        if self._open is None:
            self._open = [member for member in self if member.samples and member.leave_reason is None]
        return self._open

    def adopt(self, version: int) -> None:
        """Ask every member to adopt this version; no effect if it is not newer than the version asked for last."""
        if version <= self.newest_version:
            return
        self.newest_version = version
        self._wishes.append(_Wish(version))
        for member in self:
            member.generator.adopt(version)

    def read_versions(self, members: Sequence[Member]) -> list[Member]:
        """Read the versions of these members; let those that are new enough sample, and return those that begin to."""
        started = []
        for member in members:
            member.version = max(member.version, member.generator.weight_version)
            if not member.samples and member.recall is None and member.version >= self.weight_version:
                member.samples = True
                started.append(member)
        if members:
            self._count_sampling()
        return started

    def set_aside_late(self) -> list[Member]:
        """Stop the late members from sampling, and return them.

        A member is late if most sampling members have had a version that it lacks for `patience_s`, or one of them for
        twice as long.
        """
        if not self._wishes:
            return []
        sampling = [member for member in self if member.samples]
        now_s = self._clock()
        for wish in self._wishes:
            num_with_it = sum(member.version >= wish.version for member in sampling)
            if num_with_it and wish.one_has_it_s is None:
                wish.one_has_it_s = now_s
            if num_with_it and 2 * num_with_it >= len(sampling) and wish.most_have_it_s is None:
                wish.most_have_it_s = now_s
        due = [wish.version for wish in self._wishes if self._is_due(wish, now_s)]
        late = [member for member in sampling if member.version < max(due, default=self.weight_version)]
        if len(late) == len(sampling):  # the members that had the version have left since
            return []
        for member in late:
            member.samples = False
        self._count_sampling()
        return late

    def _is_due(self, wish: _Wish, now_s: float) -> bool:
        most_s, one_s = wish.most_have_it_s, wish.one_has_it_s
        return (most_s is not None and now_s - most_s > self._patience_s) or (
            one_s is not None and now_s - one_s > 2 * self._patience_s
        )

    def _count_sampling(self) -> None:
        self._open = None
        versions = [member.version for member in self if member.samples]
        self.weight_version = max(self.weight_version, min(versions, default=self.weight_version))
        self._wishes = [wish for wish in self._wishes if wish.version > self.weight_version]
