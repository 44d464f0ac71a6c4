"""Any number of Generators as one. They may come and go while requests are in flight.

consumes       completions of the members; requests that members which left did not finish
waits for      a completion, if the members are remote, but not longer than STEP_S
unblocked by   that; a member that has got its weights

Invariants: a request in flight is with one member or waits for one. It goes on with the tokens it has, and only at a
member whose weights are no older than they are: versions never go down along a sequence. A member that is lost, or
does not take new weights in time, leaves. While it is merely slow, the others go on with its requests.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from midflight.concurrency.background import run_at_once
from midflight.errors import GenerationError, GenerationLostError, MidflightError, RequestError, WeightUpdateError
from midflight.generation.members import Member, Members, Runner
from midflight.generation.placement import Placement
from midflight.protocols import Generator
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, RolloutId

if TYPE_CHECKING:
    from torch import Tensor

STEP_S = 0.05
DEFAULT_UPDATE_TIMEOUT_S = 60.0
DEFAULT_JOIN_TIMEOUT_S = 600.0
_LOST = (GenerationError, GenerationLostError)

_log = logging.getLogger(__name__)


def _log_engine(name: str, text: str) -> None:
    _log.info("engine %s %s", name, text)


@dataclass(frozen=True, slots=True)
class PoolHooks:
    """Callbacks to whoever knows where the members come from. All are called by the thread of the pool."""

    discover: Callable[[EnginePool], object] = lambda pool: None  # at every step: for members to join and leave
    log: Callable[[str, str], object] = _log_engine  # a member's name, and what became of it
    left: Callable[[str, str], object] = _log_engine  # the same of one that is no member any more
    # Raises RequestError if no member could take the request.
    validate: Callable[[GenerationRequest], object] = lambda request: None


class EnginePool:
    """Implements Generator over its members. For one thread; `update_weights` of remote members runs in others.

    Raises (`step`): NonFiniteWeightsError; GenerationLostError if no member has been there for `join_timeout_s`.
    """

    def __init__(
        self,
        version: int,
        weights: Mapping[str, Tensor],
        *,
        run: Runner = run_at_once,
        ended: threading.Event | None = None,
        hooks: PoolHooks = PoolHooks(),
        update_timeout_s: float = DEFAULT_UPDATE_TIMEOUT_S,
        join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`weights`: for members that join; copied, and kept until the next update.

        For remote members `run` is `run_in_background`, and `ended` what they set when `step` has something to return.
        """
        self._members = Members(version, weights, run, ended, update_timeout_s, clock)
        self._ended, self._hooks, self._join_timeout_s, self._clock = ended, hooks, join_timeout_s, clock
        self._owners: dict[RolloutId, Member] = {}
        self._waiting: dict[RolloutId, GenerationRequest] = {}
        self._completed: list[Completion] = []
        self._placement = Placement()
        self._updated_while_idle = False
        self._alone_since_s: float | None = None

    # --- members ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> frozenset[str]:
        """Names of the members, those included that have not got their first weights yet."""
        return frozenset(member.name for member in self._members)

    def has_served(self, name: str) -> bool:
        """Return True once this member has completed a request."""
        member = self._members.get(name)
        return member is not None and member.has_served

    def join(self, name: str, generator: Generator, hang_up: Callable[[], object] = lambda: None) -> None:
        """Add a member; it gets requests once it has the weights.

        `hang_up` must not wait for it, and afterwards `abort` must give back what had arrived.
        """
        self._members.add(Member(name, generator, hang_up))
        self._follow_updates()

    def leave(self, name: str, why: str) -> None:
        """Let a member finish what it has, and then leave. One that is not there is passed over."""
        if member := self._members.get(name):
            member.leaves_because = why
            self._drop_if_done(member)

    def lose(self, name: str, why: str) -> None:
        """Take a member out at once: somebody has found out that it is gone, or hangs."""
        if member := self._members.get(name):
            self._drop(member, why)

    def close(self) -> None:
        """Hang up on all members."""
        for member in self._members:
            member.hang_up()
            self._members.remove(member)

    def wait_for_member(self, timeout_s: float = STEP_S) -> bool:
        """Step until there is one that takes requests, or the time is up; whether there is."""
        deadline_s = self._clock() + timeout_s
        while not self._members.open and self._clock() < deadline_s:
            self._completed += self.step()
        return bool(self._members.open)

    # --- the verbs of a Generator -----------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Oldest version that a member samples with: a bound on the lag of what is started now holds for all.

        It never goes down.
        """
        return self._members.weight_version

    @property
    def num_in_flight(self) -> int:
        return len(self._owners) + len(self._waiting) + len(self._completed)

    @property
    def num_engines(self) -> int:
        """Number of members that take requests; 1 while there is none, so that requests wait for it."""
        return max(1, len(self._members.open))

    @property
    def update_pending(self) -> bool:
        """True while a member that samples is given new weights. A member that joins holds nobody up."""
        return self._members.update_pending

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Without a member for them they wait for one."""
        fresh = {request.rollout_id: request for request in requests}
        for rollout_id, request in fresh.items():
            if rollout_id in self._owners or rollout_id in self._waiting:
                raise RequestError(f"request {rollout_id} is in flight already")
            self._hooks.validate(request)
        if len(fresh) < len(requests):
            raise RequestError("a request is there twice")
        self._waiting |= fresh
        try:
            self._place(fresh)
        except RequestError:
            self.abort(list(fresh))
            raise

    def generated(self, rollout_id: RolloutId, start: int = 0) -> GeneratedTokens:
        if rollout_id in self._waiting:
            return (self._waiting[rollout_id].generated or GeneratedTokens.none()).part(start)
        return self._owners[rollout_id].generator.generated(rollout_id, start)

    def step(self) -> list[Completion]:
        self._hooks.discover(self)
        completions = self._advance()
        if self._ended is not None and not completions:
            self._ended.wait(STEP_S)
            completions = self._advance()
        self._check_patience()
        return completions

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """All members at once. What a member that is lost meanwhile had is among them."""
        for member in self._members:
            self._end_recall(member)
        asked: dict[Member, list[RolloutId]] = {}
        for rollout_id in rollout_ids:
            if rollout_id in self._owners:
                asked.setdefault(self._owners[rollout_id], []).append(rollout_id)
        answers = [
            (member, self._members.run(functools.partial(member.generator.abort, ids))) for member, ids in asked.items()
        ]
        aborted: list[Completion] = []
        for member, answer in answers:
            try:
                aborted += answer.result()
            except _LOST as error:
                self._drop(member, str(error))
        for completion in aborted:
            self._release(completion.rollout_id)
        waiting = [self._waiting.pop(rollout_id) for rollout_id in rollout_ids if rollout_id in self._waiting]
        return aborted + [
            Completion(each.rollout_id, each.generated or GeneratedTokens.none(), FinishReason.ABORT)
            for each in waiting
        ]

    def update_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Send them to all members at once; `update_pending` until those that sample have them, or are set aside."""
        if self.update_pending:
            raise WeightUpdateError(f"version {version} came while another is being sent")
        self._updated_while_idle = not self.num_in_flight
        self._members.update(version, weights)
        self._follow_updates()

    # --- weights ----------------------------------------------------------------------------------------------

    def _follow_updates(self) -> None:
        for member, why in self._members.failed():
            self._drop(member, why)
        for member in self._members.caught_up():
            if not member.has_joined:
                member.has_joined = True
                self._hooks.log(member.name, f"joined with weights of version {member.version}")
        for member in self._members.slow():
            member.samples = False
            if member.requests:
                member.recall = self._members.run(functools.partial(member.generator.abort, list(member.requests)))
        for member in self._members:
            if member.version is not None and not member.samples and not member.was_behind:
                member.was_behind = True  # said once: it may be so at every update
                self._hooks.log(
                    member.name,
                    f"gets no requests until it has caught up: it has version {member.version}, and others sample with"
                    f" {self.weight_version}",
                )
            if member.recall is not None and member.recall.done():
                self._end_recall(member)

    def _end_recall(self, member: Member) -> None:
        """Wait until the requests of a member that was set aside have come back."""
        recall, member.recall = member.recall, None
        if recall is None:
            return
        try:
            self._take(recall.result())
        except MidflightError as error:
            self._drop(member, str(error))
        else:
            self._drop_if_done(member)

    # --- requests ---------------------------------------------------------------------------------------------

    def _place(self, fresh: Mapping[RolloutId, GenerationRequest] | None = None) -> None:
        """Hand out what waits, as far as there is somebody for it.

        Raises: RequestError of a member that refuses a `fresh` one. A member that refuses one of others leaves.
        """
        while batches := self._assign():
            for member, batch in batches.items():
                try:
                    member.generator.add(batch)
                except RequestError as error:
                    if any(each.rollout_id in (fresh or ()) for each in batch):
                        raise
                    self._drop(member, str(error))
                    continue
                except _LOST as error:
                    # If it was stopped, it is still handing over what it has; if it is gone, `step` says so.
                    member.leaves_because = str(error)
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
        # As with one engine: what is started after an update that nobody had to go on through is sampled by it.
        if self._updated_while_idle and any(member.update is not None for member in members):
            return {}
        return self._placement.assign(self._waiting, members, self._members.newest_version)

    def _advance(self) -> list[Completion]:
        if self._ended is not None:
            self._ended.clear()  # before anybody is asked: what comes later is seen by the next wait
        self._follow_updates()
        for member in self._members:
            if member.recall is None:
                self._collect(member)
        self._follow_updates()
        self._place()
        completed, self._completed = self._completed, []
        return completed

    def _collect(self, member: Member) -> None:
        try:
            completions = member.generator.step()
        except _LOST as error:
            self._drop(member, str(error))
            return
        for completion in completions:
            if completion.finish_reason is FinishReason.ABORT:  # nobody here asked for it
                member.leaves_because = member.leaves_because or "it was stopped"
            else:
                member.has_served = True
        self._take(completions)
        self._drop_if_done(member)

    def _take(self, completions: Sequence[Completion]) -> None:
        """Pass on the requests that are done; the others wait for a member again."""
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
        if member.leaves_because is not None and not member.requests:
            self._drop(member, member.leaves_because)

    def _drop(self, member: Member, why: str) -> None:
        """Take a member out, and back what it has not finished."""
        if not self._members.remove(member):
            return
        num_in_flight = len(member.requests)
        member.hang_up()
        self._take(member.generator.abort(list(member.requests)))
        if member.requests:  # they had ended by themselves
            self._take(member.generator.step())
        if member.requests and member.recall is not None:  # they were on their way back
            self._take(member.recall.result())
        go_on = f"; {num_in_flight} rollouts go on elsewhere" if num_in_flight else ""
        self._hooks.left(member.name, f"{'left' if member.has_joined else 'could not join'}: {why}{go_on}")

    def _check_patience(self) -> None:
        if self._members.open:
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = self._clock()
        elif self._clock() - self._alone_since_s > self._join_timeout_s:
            raise GenerationLostError(
                f"no engine has joined within {self._join_timeout_s:g} s; {self.num_in_flight} rollouts wait for one"
            )
