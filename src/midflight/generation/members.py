"""The members of a pool, and the weights that each of them has.

consumes       the end of each transfer of weights
waits for      nothing; transfers to remote members run in threads of their own

Invariants: a member samples only while its weights are no older than `weight_version`, which never goes down. A member
that joins, or takes new weights much slower than the others, does not sample until it has caught up. Nobody waits for
it meanwhile.
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

# A member is too slow if it takes longer than this, and twice as long as the median of those that have the weights.
PATIENCE_S = 1.0


class Runner(Protocol):
    """Carries out a call that may block: `run_in_background`, or `run_at_once`."""

    def __call__(self, function: Callable[[], T], /) -> Future[T]: ...


@dataclass(frozen=True, slots=True)
class Update:
    """New weights on their way to one member."""

    version: int
    sent: Future[None]
    started_s: float


@dataclass(slots=True, eq=False)
class Member:
    name: str
    generator: Generator
    hang_up: Callable[[], object]
    version: int | None = None  # of its weights, or an older one; None: it has not got any from here
    update: Update | None = None
    update_s: float = 0.0  # duration of its last update
    samples: bool = False  # False: it joins, or was set aside
    has_joined: bool = False
    was_behind: bool = False
    has_served: bool = False  # it has completed a request
    leaves_because: str | None = None  # it gets no more requests, and leaves when the last is done
    recall: Future[list[Completion]] | None = None  # its requests, on their way back
    requests: dict[RolloutId, GenerationRequest] = field(default_factory=dict)


class Members:
    """Members by name. Each gets the newest weights when it is added, and whenever it has older ones."""

    def __init__(
        self,
        version: int,
        weights: Mapping[str, Tensor],
        run: Runner,
        ended: threading.Event | None,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`ended`: set when a call in the background has ended. `timeout_s`: for one update."""
        self._by_name: dict[str, Member] = {}
        self._run, self._ended, self._timeout_s, self._clock = run, ended, timeout_s, clock
        self._keep(version, weights)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> Member | None:
        return self._by_name.get(name)

    def add(self, member: Member) -> None:
        assert member.name not in self._by_name
        self._by_name[member.name] = member
        self._send(member)

    def remove(self, member: Member) -> bool:
        """Return False if it was removed before."""
        return self._by_name.pop(member.name, None) is not None

    @property
    def weight_version(self) -> int:
        """Oldest version that any member samples with; the newest one while no member samples."""
        versions = [each.version for each in self if each.samples and each.version is not None]
        return min(versions, default=self.newest_version)

    @property
    def update_pending(self) -> bool:
        """True while a member that samples is given new weights; those that do not sample are waited for by nobody."""
        return any(member.update is not None for member in self if member.samples)

    @property
    def open(self) -> list[Member]:
        """The members that take requests."""
        return [member for member in self if member.samples and member.leaves_because is None]

    def update(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Send new weights to every member; one that is still being sent older weights gets them afterwards.

        Raises: WeightUpdateError if a newer version was sent before.
        """
        if version < self.newest_version:
            raise WeightUpdateError(f"version {version} is older than version {self.newest_version}, which was sent")
        self._keep(version, weights)
        for member in self:
            if member.update is None:
                self._send(member)

    def run(self, function: Callable[[], T]) -> Future[T]:
        future = self._run(function)
        if self._ended is not None:
            ended = self._ended
            future.add_done_callback(lambda _: ended.set())
        return future

    def failed(self) -> list[tuple[Member, str]]:
        """Take note of transfers that have ended; return the members that did not get their weights, and why.

        Raises: NonFiniteWeightsError if a member refused weights that any other would refuse, too.
        """
        return [(member, why) for member in self if member.update and (why := self._settle(member, member.update))]

    def caught_up(self) -> list[Member]:
        """Let members sample whose weights are new enough, and return these; send the newest to those behind."""
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
        """The members that sample and are too slow over their update."""
        sampling = [member for member in self if member.samples]
        durations = sorted(member.update_s for member in sampling if member.update is None)
        if 2 * len(durations) < max(2, len(sampling)):
            return []
        limit_s = max(PATIENCE_S, 2 * durations[len(durations) // 2])
        return [member for member in sampling if member.update and self._age_s(member.update) > limit_s]

    def _keep(self, version: int, weights: Mapping[str, Tensor]) -> None:
        # A copy: whoever received them may receive the next ones while a slow member is still being sent these.
        self.newest_version, self._weights = version, {name: tensor.clone() for name, tensor in weights.items()}

    def _send(self, member: Member) -> None:
        version, weights = self.newest_version, self._weights
        sent = self.run(lambda: member.generator.update_weights(version, weights))
        member.update = Update(version, sent, self._clock())

    def _age_s(self, update: Update) -> float:
        return self._clock() - update.started_s

    def _settle(self, member: Member, update: Update) -> str | None:
        """Why the member did not get its weights, if so."""
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
