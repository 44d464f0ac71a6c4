"""Any number of Generators as one. They may come and go while requests are in flight.

consumes       completions of the members; requests that members which left did not finish
waits for      a completion, if the members are remote, but not longer than STEP_S
unblocked by   that; a member that has got its weights

Invariants: a request in flight is with one member or waits for one. It goes on with the tokens it has, and only at a
member whose weights are no older than they are: versions never go down along a sequence. A member that joins gets the
newest weights before any request. One that is lost, or does not take new weights in time, leaves.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from midflight.concurrency.background import run_at_once
from midflight.errors import GenerationError, GenerationLostError, MidflightError, RequestError, WeightUpdateError
from midflight.protocols import Generator
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, Int32Array, RolloutId

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

STEP_S = 0.05
DEFAULT_UPDATE_TIMEOUT_S = 60.0
DEFAULT_JOIN_TIMEOUT_S = 600.0
# A member may have so many rollouts more than another, so that the siblings of a group share their prompt's prefill.
_SIBLINGS_AHEAD = 4
_LOST = (GenerationError, GenerationLostError)

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Carries out a call that may block: `run_in_background`, or `run_at_once`."""

    def __call__(self, function: Callable[[], T], /) -> Future[T]: ...


@dataclass(frozen=True, slots=True)
class PoolHooks:
    """What a pool leaves to whoever knows where its members come from. All are called by the thread of the pool."""

    look: Callable[[EnginePool], object] = lambda pool: None  # at every step: for members to join and leave
    say: Callable[[str, str], object] = lambda name, text: _log.info("engine %s %s", name, text)  # what became of one
    check: Callable[[GenerationRequest], object] = lambda request: None  # raises RequestError: no member could take it


@dataclass(frozen=True, slots=True)
class _Update:
    version: int
    sent: Future[None]
    deadline_s: float


@dataclass(slots=True, eq=False)
class _Member:
    name: str
    generator: Generator
    hang_up: Callable[[], object]
    version: int | None = None  # of its weights, or an older one; None: it has not got any from here
    update: _Update | None = None
    leaves_because: str | None = None  # it gets no more requests, and leaves when the last is done
    requests: dict[RolloutId, GenerationRequest] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.version is not None and self.leaves_because is None


class EnginePool:
    """Implements Generator over its members. For one thread; `update_weights` of remote members runs in others.

    Raises: GenerationLostError from `step` if no member has been there for `join_timeout_s`.
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
        """`weights`: for members that join; kept until the next update.

        For remote members `run` is `run_in_background`, and `ended` what they set when `step` has something to return.
        """
        self._version, self._weights = version, weights
        self._run, self._ended, self._hooks, self._clock = run, ended, hooks, clock
        self._update_timeout_s, self._join_timeout_s = update_timeout_s, join_timeout_s
        self._members: dict[str, _Member] = {}
        self._owners: dict[RolloutId, _Member] = {}
        self._waiting: dict[RolloutId, GenerationRequest] = {}
        self._completed: list[Completion] = []
        self._newest_prompt: tuple[Int32Array, _Member] | None = None
        self._updated_while_idle = False
        self._alone_since_s: float | None = None

    # --- members ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> frozenset[str]:
        """Of the members, those included that have not got their first weights yet."""
        return frozenset(self._members)

    def join(self, name: str, generator: Generator, hang_up: Callable[[], object] = lambda: None) -> None:
        """Add a member; it gets requests once it has the weights.

        `hang_up` must not wait for it, and afterwards `abort` must give back what had arrived.
        """
        assert name not in self._members
        member = self._members[name] = _Member(name, generator, hang_up)
        self._send_weights(member)
        self._settle_updates()

    def leave(self, name: str, why: str) -> None:
        """Let a member finish what it has, and then leave. One that is not there is passed over."""
        member = self._members.get(name)
        if member is not None:
            member.leaves_because = why
            self._drop_if_done(member)

    def lose(self, name: str, why: str) -> None:
        """Take a member out at once: somebody has found out that it is gone, or hangs."""
        member = self._members.get(name)
        if member is not None:
            self._drop(member, why)

    def close(self) -> None:
        """Hang up on all members."""
        for member in self._members.values():
            member.hang_up()
        self._members.clear()

    def wait_for_member(self, timeout_s: float = STEP_S) -> bool:
        """Step until there is one that takes requests, or the time is up; whether there is."""
        deadline_s = self._clock() + timeout_s
        while not self._open_members() and self._clock() < deadline_s:
            self._completed += self.step()
        return bool(self._open_members())

    # --- the verbs of a Generator -----------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """The oldest of any member: what is started now may be sampled by it, and a bound on the lag holds for all.

        It never goes down: weights of members only get newer, and who joins has the newest.
        """
        return min((each.version for each in self._members.values() if each.version is not None), default=self._version)

    @property
    def num_in_flight(self) -> int:
        return len(self._owners) + len(self._waiting) + len(self._completed)

    @property
    def num_engines(self) -> int:
        """Of those that take requests; 1 while there is none, so that requests wait for it."""
        return max(1, len(self._open_members()))

    @property
    def update_pending(self) -> bool:
        """Also while a member that joins gets its first weights."""
        return any(member.update is not None for member in self._members.values())

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Without a member for them they wait for one."""
        fresh = {request.rollout_id: request for request in requests}
        for rollout_id, request in fresh.items():
            if rollout_id in self._owners or rollout_id in self._waiting:
                raise RequestError(f"request {rollout_id} is in flight already")
            self._hooks.check(request)
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
        self._hooks.look(self)
        completions = self._advance()
        if self._ended is not None and not completions:
            self._ended.wait(STEP_S)
            completions = self._advance()
        self._check_patience()
        return completions

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        """All members at once. What a member that is lost meanwhile had is among them."""
        asked: dict[_Member, list[RolloutId]] = {}
        for rollout_id in rollout_ids:
            if rollout_id in self._owners:
                asked.setdefault(self._owners[rollout_id], []).append(rollout_id)
        answers = [(member, self._run(functools.partial(member.generator.abort, ids))) for member, ids in asked.items()]
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
        """Send them to all members at once; `update_pending` until each of them has them, or has left."""
        if self.update_pending:
            raise WeightUpdateError(f"version {version} came while another is being sent")
        self._updated_while_idle = not self.num_in_flight
        self._version, self._weights = version, weights
        for member in self._members.values():
            self._send_weights(member)
        self._settle_updates()

    # --- weights ----------------------------------------------------------------------------------------------

    def _send_weights(self, member: _Member) -> None:
        version, weights, ended = self._version, self._weights, self._ended
        sent = self._run(lambda: member.generator.update_weights(version, weights))
        if ended is not None:
            sent.add_done_callback(lambda _: ended.set())
        member.update = _Update(version, sent, self._clock() + self._update_timeout_s)

    def _settle_updates(self) -> None:
        for member in list(self._members.values()):
            update = member.update
            if update is None:
                continue
            if not update.sent.done():
                if self._clock() > update.deadline_s:
                    self._drop(member, f"it did not take version {update.version} in {self._update_timeout_s:g} s")
            elif error := update.sent.exception():
                self._drop(member, str(error) if isinstance(error, MidflightError) else repr(error))
            elif not member.generator.update_pending:
                has_joined = member.version is None
                member.version, member.update = update.version, None
                if has_joined:
                    self._hooks.say(member.name, f"joined with weights of version {update.version}")

    # --- requests ---------------------------------------------------------------------------------------------

    def _open_members(self) -> list[_Member]:
        return [member for member in self._members.values() if member.is_open]

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

    def _assign(self) -> dict[_Member, list[GenerationRequest]]:
        """Who gets which of the waiting requests, those that were started first first."""
        members = self._open_members()
        # As with one engine: what is started after an update that nobody had to go on through is sampled by it.
        if self._updated_while_idle and any(member.update is not None for member in members):
            return {}
        batches: dict[_Member, list[GenerationRequest]] = {}
        for rollout_id in sorted(self._waiting) if members else ():
            request = self._waiting[rollout_id]
            able = [member for member in members if (member.version or 0) >= self._oldest_version_for(request)]
            if able:
                batches.setdefault(self._choose(request, able, batches), []).append(request)
        return batches

    def _oldest_version_for(self, request: GenerationRequest) -> int:
        """That of its newest token; or what there is, if the trainer lost the weights that sampled it."""
        return min(self._version, int(request.generated.weight_versions.max())) if request.generated else 0

    def _choose(
        self, request: GenerationRequest, able: Sequence[_Member], batches: Mapping[_Member, Sequence[Any]]
    ) -> _Member:
        """The member with the fewest requests, or that of the newest sibling."""

        def load(member: _Member) -> int:
            return len(member.requests) + len(batches.get(member, ()))

        chosen = min(able, key=load)
        if self._newest_prompt is not None:
            prompt, member = self._newest_prompt
            is_sibling = np.array_equal(prompt, request.prompt_token_ids)
            if is_sibling and member in able and load(member) < load(chosen) + _SIBLINGS_AHEAD:
                chosen = member
        self._newest_prompt = request.prompt_token_ids, chosen
        return chosen

    def _advance(self) -> list[Completion]:
        if self._ended is not None:
            self._ended.clear()  # before anybody is asked: what comes later is seen by the next wait
        self._settle_updates()
        for member in list(self._members.values()):
            self._collect(member)
        self._settle_updates()
        self._place()
        completed, self._completed = self._completed, []
        return completed

    def _collect(self, member: _Member) -> None:
        try:
            completions = member.generator.step()
        except _LOST as error:
            self._drop(member, str(error))
            return
        self._take(member, completions)
        self._drop_if_done(member)

    def _take(self, member: _Member, completions: Sequence[Completion]) -> None:
        for completion in completions:
            request = self._release(completion.rollout_id)
            if completion.finish_reason is FinishReason.ABORT:
                # Nobody here asked for it: the engine is being stopped.
                member.leaves_because = member.leaves_because or "it was stopped"
                self._wait_again(request, completion.generated)
            else:
                self._completed.append(completion)

    def _release(self, rollout_id: RolloutId) -> GenerationRequest:
        return self._owners.pop(rollout_id).requests.pop(rollout_id)

    def _wait_again(self, request: GenerationRequest, generated: GeneratedTokens) -> None:
        self._waiting[request.rollout_id] = replace(request, generated=generated if len(generated) else None)

    def _drop_if_done(self, member: _Member) -> None:
        if member.leaves_because is not None and not member.requests:
            self._drop(member, member.leaves_because)

    def _drop(self, member: _Member, why: str) -> None:
        """Take a member out, and back what it has not finished."""
        if self._members.pop(member.name, None) is None:
            return
        num_in_flight = len(member.requests)
        member.hang_up()
        self._take(member, member.generator.abort(list(member.requests)))
        if member.requests:  # they had ended by themselves
            self._take(member, member.generator.step())
        go_on = f"; {num_in_flight} rollouts go on elsewhere" if num_in_flight else ""
        self._hooks.say(member.name, f"left: {why}{go_on}")

    def _check_patience(self) -> None:
        if self._open_members():
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = self._clock()
        elif self._clock() - self._alone_since_s > self._join_timeout_s:
            raise GenerationLostError(
                f"no engine has joined within {self._join_timeout_s:g} s; {self.num_in_flight} rollouts wait for one"
            )
