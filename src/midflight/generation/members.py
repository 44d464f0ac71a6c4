"""The members of a pool and their weights.

consumes       the end of each weight transfer
waits for      nothing; transfers to remote members run in their own threads

Invariants: a member samples only while its weights are no older than `weight_version`, which never decreases. A member
that joins, or takes new weights much more slowly than the other members, does not sample until it has caught up. The
pool does not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from midflight.errors import MidflightError, NonFiniteWeightsError, WeightUpdateError
from midflight.protocols import Generator
from midflight.types import Completion, GenerationRequest, RolloutId

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# A member is too slow if its update takes longer than this, and twice as long as the median of the finished updates.
PATIENCE_S = 1.0


class Runner(Protocol):
    """Executes a call that may block: `run_in_background` or `run_at_once`."""

    def __call__(self, function: Callable[[], T], /) -> Future[T]: ...


@dataclass(frozen=True, slots=True)
class Update:
    """New weights on their way to one member."""

    version: int
    sent: Future[None]
    started_s: float


@dataclass(slots=True, eq=False)
class Member:
    """One engine of a pool."""

    name: str
    generator: Generator
    hang_up: Callable[[], object]
    version: int | None = None  # lower bound of its weight version; None: it has no weights from this pool yet
    update: Update | None = None
    update_s: float = 0.0  # duration of its last update
    samples: bool = False  # False: it is joining, or was set aside because it is slow
    has_joined: bool = False
    was_behind: bool = False  # the log has said that it must catch up
    has_served: bool = False  # it has completed a request
    leave_reason: str | None = None  # set: it gets no more requests and leaves after the last one
    recall: Future[list[Completion]] | None = None  # the abort that takes its requests back, after it was set aside
    requests: dict[RolloutId, GenerationRequest] = field(default_factory=dict)


class Members:
    """Members by name. A member is sent the newest weights when it is added and whenever it has older ones."""

    def __init__(
        self,
        version: int,
        weights: Mapping[str, Tensor],
        run: Runner,
        ended: threading.Event | None,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Create an empty set of members.

        `ended`: event to set when a background call has ended. `timeout_s`: for one update.
        """
        self._by_name: dict[str, Member] = {}
        self._run, self._ended, self._timeout_s, self._clock = run, ended, timeout_s, clock
        self._keep(version, weights)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> Member | None:
        return self._by_name.get(name)

    def add(self, member: Member) -> None:
        """Add a member and start to send it the newest weights."""
        assert member.name not in self._by_name
        self._by_name[member.name] = member
        self._send(member)

    def remove(self, member: Member) -> bool:
        """Remove a member; return False if it was removed before."""
        return self._by_name.pop(member.name, None) is not None

    @property
    def weight_version(self) -> int:
        """Oldest version that any member samples with; the newest one while no member samples."""
        versions = [member.version for member in self if member.samples and member.version is not None]
        return min(versions, default=self.newest_version)

    @property
    def update_pending(self) -> bool:
        """True while a sampling member receives new weights. Updates of members that do not sample do not count."""
        return any(member.update is not None for member in self if member.samples)

    @property
    def open(self) -> list[Member]:
        """The members that accept requests."""
        return [member for member in self if member.samples and member.leave_reason is None]

    def update(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Send new weights to every member, after any transfer of older weights to that member.

        Raises: WeightUpdateError if a newer version was sent before.
        """
        if version < self.newest_version:
            raise WeightUpdateError(f"version {version} is older than version {self.newest_version}, which was sent")
        self._keep(version, weights)
        for member in self:
            if member.update is None:
                self._send(member)

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Execute a call that may block; set `ended` when it is done."""
        future = self._run(function)
        if self._ended is not None:
            ended = self._ended
            future.add_done_callback(lambda _: ended.set())
        return future

    def failed(self) -> list[tuple[Member, str]]:
        """Record transfers that have ended; return the members that did not get their weights, with the reason.

        Raises: NonFiniteWeightsError if a member refused the weights, as all members would.
        """
        return [
            (member, reason)
            for member in self
            if member.update and (reason := self._check_update(member, member.update))
        ]

    def caught_up(self) -> list[Member]:
        """Let members with new enough weights sample, and return them; send the newest weights to members behind."""
        new = []
        for member in self:
            if member.version is None:
                continue
            if not member.samples and member.recall is None and member.version >= self.weight_version:
                member.samples = True
                new.append(member)
            if member.update is None and member.version < self.newest_version:
                self._send(member)
        return new

    def slow(self) -> list[Member]:
        """Return the sampling members whose update takes too long."""
        sampling = [member for member in self if member.samples]
        durations = sorted(member.update_s for member in sampling if member.update is None)
        if 2 * len(durations) < max(2, len(sampling)):
            return []
        limit_s = max(PATIENCE_S, 2 * durations[len(durations) // 2])
        return [member for member in sampling if member.update and self._age_s(member.update) > limit_s]

    def _keep(self, version: int, weights: Mapping[str, Tensor]) -> None:
        # A copy, because the caller may reuse the tensors for the next version before a slow member has received these.
        self.newest_version, self._weights = version, {name: tensor.clone() for name, tensor in weights.items()}

    def _send(self, member: Member) -> None:
        version, weights = self.newest_version, self._weights
        sent = self.run(lambda: member.generator.update_weights(version, weights))
        member.update = Update(version, sent, self._clock())

    def _age_s(self, update: Update) -> float:
        return self._clock() - update.started_s

    def _check_update(self, member: Member, update: Update) -> str | None:
        """Record the update if it has ended; return the reason if it has failed."""
        if not update.sent.done():
            late = self._age_s(update) > self._timeout_s
            return f"it did not take version {update.version} in {self._timeout_s:g} s" if late else None
        if error := update.sent.exception():
            if isinstance(error, NonFiniteWeightsError):
                member.update = None
                raise error
            return str(error) if isinstance(error, MidflightError) else repr(error)
        if not member.generator.update_pending:
            member.version, member.update, member.update_s = update.version, None, self._age_s(update)
        return None
