"""EnginePool: any number of Generators as one. Members may join and leave while requests are in flight.

consumes       completions of the members; unfinished requests of members that left
waits for      news of a member, at most STEP_S; only if the members are remote
unblocked by   a completion; a member that is lost or has adopted new weights

The pool holds no weights: `adopt` tells the members which version to sample with, and the tensors reach each member on
their own.

Invariants: a request in flight belongs to one member or waits for one. If it changes members, it keeps its tokens, and
the new member has weights no older than the tokens: versions never decrease along a sequence. A member that is lost
leaves. If a member is only late with new weights, the other members take over its requests until it has caught up.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from midflight.concurrency.background import run_at_once
from midflight.errors import GenerationError, GenerationLostError, MidflightError, RequestError
from midflight.generation.members import PATIENCE_S, Member, Members, Runner
from midflight.generation.news import News
from midflight.generation.placement import Placement
from midflight.protocols import NO_VERSION, Generator
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, RolloutId

STEP_S = 0.05
DEFAULT_JOIN_TIMEOUT_S = 600.0
_LOST = (GenerationError, GenerationLostError)

T = TypeVar("T")

_log = logging.getLogger(__name__)


def _log_engine(name: str, text: str) -> None:
    _log.info("engine %s %s", name, text)


@dataclass(frozen=True, slots=True)
class PoolHooks:
    """Callbacks to the owner of the pool, called by the thread that uses the pool."""

    discover: Callable[[EnginePool], object] = lambda pool: None  # called at every step: lets members join and leave
    log: Callable[[str, str], object] = _log_engine  # receives the name of a member and an event
    left: Callable[[str, str], object] = _log_engine  # receives the name of a former member and the reason
    # Raises RequestError if no member could run the request.
    validate: Callable[[GenerationRequest], object] = lambda request: None


class EnginePool:
    """Implements Generator over its members. For use by one thread.

    Raises (`step`): GenerationLostError if no member has accepted requests for `join_timeout_s`; WeightUpdateError of a
    member.
    """

    def __init__(
        self,
        version: int,
        *,
        run: Runner = run_at_once,
        news: News | None = None,
        hooks: PoolHooks = PoolHooks(),
        patience_s: float = PATIENCE_S,
        join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a pool without members.

        `version`: members sample with this version or a newer one. `run`: `run_in_background` for remote members.
        `news`: where remote members tell of completions, losses and new weights; None: every step asks all members.
        `patience_s`: time for which most members have new weights before the others are late.
        """
        self._members = Members(version, clock, patience_s)
        self._run, self._news, self._hooks = run, news, hooks
        self._join_timeout_s, self._clock = join_timeout_s, clock
        self._owners: dict[RolloutId, Member] = {}
        self._waiting: dict[RolloutId, GenerationRequest] = {}
        self._completed: list[Completion] = []
        self._placement = Placement()
        self._idle_version = version  # newest version asked for while nothing was in flight
        self._empty_since_s: float | None = None

    # --- members ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> frozenset[str]:
        """Names of the members, including members that wait for weights."""
        return frozenset(member.name for member in self._members)

    def has_served(self, name: str) -> bool:
        """Return True once this member has completed a request."""
        member = self._members.get(name)
        return member is not None and member.has_served

    def join(
        self,
        name: str,
        generator: Generator,
        hang_up: Callable[[], object] = lambda: None,
        num_slots: int | None = None,
    ) -> None:
        """Add a member; it gets requests once its weights are no older than the pool's.

        `hang_up`: disconnects without waiting for the member; `abort` must then return the tokens that had arrived.
        `num_slots`: sequences that the member generates at a time; None: not known.
        """
        member = Member(name, generator, hang_up, num_slots)
        self._members.add(member)
        self._follow_versions([member])
        if self._news is not None:  # what the member told before it joined was ignored
            self._news.notifier(name)()

    def leave(self, name: str, reason: str) -> None:
        """Give a member no more requests and remove it after its last one; an unknown name is ignored."""
        if member := self._members.get(name):
            self._members.retire(member, reason)
            self._drop_if_done(member)

    def lose(self, name: str, reason: str) -> None:
        """Remove a member at once because it is gone or hangs; an unknown name is ignored."""
        if member := self._members.get(name):
            self._drop(member, reason)

    def close(self) -> None:
        """Disconnect from all members."""
        for member in self._members:
            member.hang_up()
            self._members.remove(member)

    def wait_for_member(self, timeout_s: float = STEP_S) -> bool:
        """Step until a member accepts requests, at most `timeout_s` seconds; return True if one does."""
        deadline_s = self._clock() + timeout_s
        while not self._members.open and self._clock() < deadline_s:
            self._completed += self.step()
        return bool(self._members.open)

    # --- Generator --------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Oldest version that a member samples with, so that lag bounds hold for every member; never decreases."""
        return self._members.weight_version

    @property
    def num_in_flight(self) -> int:
        return len(self._owners) + len(self._waiting) + len(self._completed)

    @property
    def num_engines(self) -> int:
        """Number of members that accept requests; 1 if there are none, so that requests are added and wait."""
        return max(1, len(self._members.open))

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests, all or none; requests without a member wait for one."""
        added = {request.rollout_id: request for request in requests}
        for rollout_id, request in added.items():
            if rollout_id in self._owners or rollout_id in self._waiting:
                raise RequestError(f"request {rollout_id} is in flight already")
            self._hooks.validate(request)
        if len(added) < len(requests):
            raise RequestError("a request is in the list twice; every request needs its own id")
        self._waiting |= added
        try:
            self._place(added)
        except RequestError:
            self.abort(list(added))
            raise

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        if rollout_id in self._waiting:
            return (self._waiting[rollout_id].generated or GeneratedTokens.none()).part(start)
        return self._owners[rollout_id].generator.generated(rollout_id, start)

    def step(self) -> list[Completion]:
        self._hooks.discover(self)
        completions = self._advance(0.0)
        if self._news is not None and not completions:
            completions = self._advance(STEP_S)
        self._check_join_timeout()
        return completions

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """Abort requests at all members in parallel; includes the requests of a member that is lost during the call."""
        for member in self._members:
            self._finish_recall(member)
        by_member: dict[Member, list[RolloutId]] = {}
        for rollout_id in rollout_ids:
            if rollout_id in self._owners:
                by_member.setdefault(self._owners[rollout_id], []).append(rollout_id)
        for member, ids in by_member.items():
            member.recall = self._start(member, functools.partial(member.generator.abort, ids))
        aborted: list[Completion] = []
        for member in by_member:
            assert member.recall is not None
            try:
                completions = member.recall.result()
            except _LOST as error:
                self._drop(member, str(error))
            else:
                aborted += completions
            member.recall = None
        for completion in aborted:
            self._release(completion.rollout_id)
        waiting = [self._waiting.pop(rollout_id) for rollout_id in rollout_ids if rollout_id in self._waiting]
        return aborted + [
            Completion(request.rollout_id, request.generated or GeneratedTokens.none(), FinishReason.ABORT)
            for request in waiting
        ]

    def adopt(self, version: int) -> None:
        """Ask all members to sample with this version; `weight_version` follows the slowest member that samples."""
        if not self.num_in_flight:
            self._idle_version = max(self._idle_version, version)
        self._members.adopt(version)
        self._follow_versions(list(self._members))

    # --- weights ----------------------------------------------------------------------------------------------

    def _follow_versions(self, changed: Sequence[Member]) -> None:
        """Read the versions of these members, and set aside the members that are late."""
        for member in self._members.read_versions(changed):
            if not member.has_joined:
                member.has_joined = True
                self._hooks.log(member.name, f"joined with weights of version {member.version}")
        late = self._members.set_aside_late()
        for member in late:
            if member.requests:
                member.recall = self._start(member, functools.partial(member.generator.abort, list(member.requests)))
        for member in (*changed, *late):
            if member.version != NO_VERSION and not member.samples and not member.was_behind:
                member.was_behind = True  # log this once per member, because it may happen at every update
                self._hooks.log(
                    member.name,
                    f"gets no requests until it has caught up: it has version {member.version}, and others sample with"
                    f" {self.weight_version}",
                )
            if member.recall is not None and member.recall.done():
                self._finish_recall(member)

    def _start(self, member: Member, function: Callable[[], T]) -> Future[T]:
        """Execute a call of a member that may block; its end is news of the member."""
        future = self._run(function)
        if self._news is not None:
            notify = self._news.notifier(member.name)
            future.add_done_callback(lambda _: notify())
        return future

    def _finish_recall(self, member: Member) -> None:
        """Wait for the requests of a member that was set aside, and let them wait for another member."""
        if member.recall is None:
            return
        try:
            recalled = member.recall.result()
        except MidflightError as error:
            self._drop(member, str(error))
            return
        member.recall = None
        self._handle(recalled)
        if self._news is not None:  # the member's news during the recall was ignored
            self._news.notifier(member.name)()
        self._drop_if_done(member)

    # --- requests ---------------------------------------------------------------------------------------------

    def _place(self, added: Mapping[RolloutId, GenerationRequest] | None = None) -> None:
        """Send waiting requests to members that can run them.

        Raises: RequestError if a member refuses a request in `added`. A member that refuses any other request leaves.
        """
        while batches := self._assign():
            for member, batch in batches.items():
                try:
                    member.generator.add(batch)
                except RequestError as error:
                    if any(request.rollout_id in (added or ()) for request in batch):
                        raise
                    self._drop(member, str(error))
                    continue
                except _LOST as error:
                    # A stopped member still hands over its requests in `step`; a member that is gone fails there.
                    self._members.retire(member, str(error))
                    self._drop_if_done(member)
                    continue
                for request in batch:
                    del self._waiting[request.rollout_id]
                    member.requests[request.rollout_id] = request
                    self._owners[request.rollout_id] = member

    def _assign(self) -> dict[Member, list[GenerationRequest]]:
        if not self._waiting:
            return {}
        members = self._members.open
        # As with a single engine: requests added after an update of an idle pool are sampled by the new weights.
        if any(member.version < self._idle_version for member in members):
            return {}
        return self._placement.assign(self._waiting, members, self._members.newest_version)

    def _advance(self, timeout_s: float) -> list[Completion]:
        members = list(self._members) if self._news is None else self._members.of(self._news.take(timeout_s))
        self._follow_versions(members)
        for member in members:
            if member in self._members and member.recall is None:
                self._collect(member)
        self._follow_versions([member for member in members if member in self._members])
        self._place()
        completed, self._completed = self._completed, []
        return completed

    def _collect(self, member: Member) -> None:
        """Take a member's completions. A member that tells of news is asked until it has told everything."""
        while self._collect_once(member) and self._news is not None and member in self._members:
            pass

    def _collect_once(self, member: Member) -> bool:
        try:
            completions = member.generator.step()
        except (*_LOST, RequestError) as error:  # RequestError: the server has refused a request that was added
            self._drop(member, str(error))
            return False
        for completion in completions:
            if completion.finish_reason is FinishReason.ABORT:  # not aborted by the pool
                self._members.retire(member, member.leave_reason or "it was stopped")
            else:
                member.has_served = True
        self._handle(completions)
        self._drop_if_done(member)
        return bool(completions)

    def _handle(self, completions: Sequence[Completion]) -> None:
        """Queue finished requests for `step` to return; aborted requests wait for a member again."""
        for completion in completions:
            request = self._release(completion.rollout_id)
            if completion.finish_reason is FinishReason.ABORT:
                generated = completion.generated if len(completion.generated) else None
                self._waiting[request.rollout_id] = replace(request, generated=generated)
            else:
                self._completed.append(completion)

    def _release(self, rollout_id: RolloutId) -> GenerationRequest:
        return self._owners.pop(rollout_id).requests.pop(rollout_id)

    def _drop_if_done(self, member: Member) -> None:
        if member.leave_reason is not None and not member.requests:
            self._drop(member, member.leave_reason)

    def _drop(self, member: Member, reason: str) -> None:
        """Remove a member and take back its unfinished requests."""
        if not self._members.remove(member):
            return
        num_in_flight = len(member.requests)
        member.hang_up()
        self._handle(member.generator.abort(list(member.requests)))
        if member.requests:  # they had finished before the abort
            self._handle(member.generator.step())
        if member.requests and member.recall is not None:  # the recall has taken them
            self._handle(member.recall.result())
        resumed = f"; {num_in_flight} rollouts go on elsewhere" if num_in_flight else ""
        self._hooks.left(member.name, f"{'left' if member.has_joined else 'could not join'}: {reason}{resumed}")

    def _check_join_timeout(self) -> None:
        if self._members.open:
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = self._clock()
        elif self._clock() - self._empty_since_s > self._join_timeout_s:
            raise GenerationLostError(
                f"no engine has joined within {self._join_timeout_s:g} s; {self.num_in_flight} rollouts wait for one"
            )
