"""The actor starts rollouts when the schedule says so, grades them, and hands over whole groups.

Invariants: every started group is in exactly one of open (not all members done), ready (graded, waiting to be
chosen), chosen, dropped or failed. Group g is about problem g, and rollout ids follow from group ids, so a restarted
actor asks the same questions with the same random numbers.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from midflight.errors import RequestError, RolloutError
from midflight.protocols import Environment, Generator, Schedule
from midflight.types import (
    ActorCheckpoint,
    ActorState,
    Completion,
    FinishReason,
    FleetView,
    GeneratedTokens,
    GenerationRequest,
    GroupId,
    ReadyGroup,
    Rollout,
    RolloutGroup,
    RolloutId,
    RolloutStatus,
    SamplingParams,
)

# A verifier that never works should end a run, not keep it busy for ever.
_MAX_FAILED_IN_A_ROW = 64

NEW_ACTOR = ActorState(
    next_group_id=GroupId(0),
    open_group_ids=[],
    num_batches=0,
    num_failed_groups=0,
    num_dropped_groups=0,
    generated_tokens=0,
    num_updates=0,
    num_aborted=0,
)


@dataclass(frozen=True, slots=True)
class ActorConfig:
    batch_size: int
    group_size: int
    sampling: SamplingParams
    seed: int


class Actor:
    """One engine's rollouts, from admission to the ready queue."""

    def __init__(
        self,
        config: ActorConfig,
        generator: Generator,
        schedule: Schedule,
        environment: Environment,
        tokenizer: Any,
        state: ActorState = NEW_ACTOR,
        partial_groups: Sequence[RolloutGroup] = (),
    ) -> None:
        """Goes on from `state`; `partial_groups` are open groups whose rollouts keep the tokens they have."""
        self._config = config
        self._generator = generator
        self._schedule = schedule
        self._environment = environment
        self._tokenizer = tokenizer
        self._state = state
        self._open: dict[GroupId, RolloutGroup] = {}
        self._ready: OrderedDict[GroupId, RolloutGroup] = OrderedDict()
        self._to_admit: deque[Rollout] = deque()
        self._running: dict[RolloutId, Rollout] = {}
        self._failed_in_a_row = 0
        self._num_started = self._num_finished = state.num_batches * config.batch_size
        self._restore({group.group_id: group for group in partial_groups})

    # --- what the schedule is shown ---------------------------------------------------------------------------

    def fleet(self, newest_version: int) -> FleetView:
        return FleetView(
            version=self._generator.weight_version,
            newest_version=newest_version,
            num_batches=self._state.num_batches,
            num_started=self._num_started,
            num_in_flight=len(self._running),
            num_finished=self._num_finished,
            oldest_open_group=min(self._open, default=None),
        )

    @property
    def state(self) -> ActorState:
        return replace(self._state, open_group_ids=sorted([*self._open, *self._ready]))

    # --- verbs ------------------------------------------------------------------------------------------------

    def admit(self, fleet: FleetView) -> None:
        """Start as many rollouts as the schedule wants, opening groups as needed."""
        for _ in range(self._schedule.num_to_admit(fleet)):
            if not self._to_admit:
                self._open_group()
            self._start(self._to_admit.popleft())

    def step(self) -> None:
        """One token for everything in flight; grades what finished."""
        for completion in self._generator.step():
            self._finish(completion)

    def note_update(self) -> None:
        self._state = replace(self._state, num_updates=self._state.num_updates + 1)

    def choose_batch(self, fleet: FleetView) -> list[RolloutGroup] | None:
        """The groups of the next batch, taken out of the ready queue; None if it is not time."""
        ready = [ReadyGroup(group_id, len(group.rollouts)) for group_id, group in self._ready.items()]
        choice = self._schedule.choose_batch(fleet, ready)
        if choice is None:
            return None
        for group_id in choice.drop:
            num_rollouts = len(self._ready.pop(group_id).rollouts)
            self._forget(num_rollouts, finished=num_rollouts)
        self._state = replace(
            self._state,
            num_batches=self._state.num_batches + 1,
            num_dropped_groups=self._state.num_dropped_groups + len(choice.drop),
        )
        return [self._ready.pop(group_id) for group_id in choice.train]

    def abort(self) -> None:
        """Interrupt everything in flight; the partial rollouts are the first to be admitted again, oldest first."""
        num_aborted = self._suspend()
        self._state = replace(self._state, num_aborted=self._state.num_aborted + num_aborted)

    def checkpoint(self) -> ActorCheckpoint:
        """Stop for good: the state and every group not yet chosen, with the tokens it has."""
        self._suspend()
        return ActorCheckpoint(self.state, [*self._ready.values(), *self._open.values()])

    # --- inside -----------------------------------------------------------------------------------------------

    def _open_group(self, group_id: GroupId | None = None) -> RolloutGroup:
        if group_id is None:
            group_id = self._state.next_group_id
            self._state = replace(self._state, next_group_id=GroupId(group_id + 1))
        problem = self._environment.problem(group_id)
        prompt = np.array(self._tokenizer.encode(problem.prompt), np.int32)
        first = group_id * self._config.group_size
        rollouts = [
            Rollout(RolloutId(first + member), group_id, RolloutStatus.PARTIAL, prompt, GeneratedTokens.none())
            for member in range(self._config.group_size)
        ]
        group = RolloutGroup(group_id, problem, rollouts)
        self._open[group_id] = group
        self._to_admit.extend(rollouts)
        return group

    def _start(self, rollout: Rollout) -> None:
        request = GenerationRequest(
            rollout_id=rollout.rollout_id,
            prompt_token_ids=rollout.prompt_token_ids,
            sampling=self._config.sampling,
            seed=self._config.seed,
            generated=rollout.generated if len(rollout.generated) else None,
        )
        self._num_started += 1
        try:
            self._generator.add([request])
        except RequestError as error:  # a prompt that is too long, say
            self._fail(rollout, error)
            self._close_if_done(self._open[rollout.group_id])
        else:
            rollout.status = RolloutStatus.RUNNING
            self._running[rollout.rollout_id] = rollout

    def _suspend(self) -> int:
        completions = self._generator.abort(list(self._running))
        suspended = [self._running.pop(completion.rollout_id) for completion in completions]
        for rollout, completion in zip(suspended, completions, strict=True):
            self._count_tokens(rollout, completion)
            rollout.status = RolloutStatus.PARTIAL
        self._to_admit.extendleft(sorted(suspended, key=lambda rollout: -rollout.rollout_id))
        self._num_started -= len(suspended)
        return len(suspended)

    def _count_tokens(self, rollout: Rollout, completion: Completion) -> None:
        new_tokens = len(completion.generated) - len(rollout.generated)
        self._state = replace(self._state, generated_tokens=self._state.generated_tokens + new_tokens)
        rollout.generated = completion.generated

    def _restore(self, partial: dict[GroupId, RolloutGroup]) -> None:
        for group_id in self._state.open_group_ids:
            if group_id not in partial:
                self._open_group(group_id)
                continue
            group = partial[group_id]
            self._open[group_id] = group
            unfinished = [rollout for rollout in group.rollouts if rollout.status is RolloutStatus.PARTIAL]
            self._to_admit.extend(unfinished)
            self._num_started += len(group.rollouts) - len(unfinished)
            self._close_if_done(group)

    def _finish(self, completion: Completion) -> None:
        rollout = self._running.pop(completion.rollout_id)
        self._count_tokens(rollout, completion)
        rollout.finish_reason = completion.finish_reason
        group = self._open[rollout.group_id]
        self._grade(group, rollout)
        self._close_if_done(group)

    def _grade(self, group: RolloutGroup, rollout: Rollout) -> None:
        """One boundary for what user code may do wrong: a bad rollout is data, not a crash."""
        token_ids = rollout.generated.token_ids
        if rollout.finish_reason is FinishReason.STOP:
            token_ids = token_ids[:-1]
        if not np.isfinite(rollout.generated.logprobs).all():
            self._fail(
                rollout, FloatingPointError("the policy that sampled it has log-probabilities that are no numbers")
            )
            return
        try:
            grade = self._environment.grade(group.problem, self._tokenizer.decode(token_ids))
            if not math.isfinite(grade.reward):
                raise ValueError(f"the reward is {grade.reward}")
        except Exception as error:
            self._fail(rollout, error)
            return
        rollout.status = RolloutStatus.FINISHED
        rollout.reward, rollout.reward_components = float(grade.reward), grade.components

    def _fail(self, rollout: Rollout, error: Exception) -> None:
        rollout.status = RolloutStatus.FAILED
        rollout.failure = f"{type(error).__name__}: {error}"

    def _close_if_done(self, group: RolloutGroup) -> None:
        statuses = {rollout.status for rollout in group.rollouts}
        if statuses & {RolloutStatus.RUNNING, RolloutStatus.PARTIAL}:
            return
        del self._open[group.group_id]
        if RolloutStatus.FAILED in statuses:
            self._state = replace(self._state, num_failed_groups=self._state.num_failed_groups + 1)
            self._forget(len(group.rollouts), finished=0)
            self._stop_if_hopeless(group)
        else:
            self._failed_in_a_row = 0
            self._ready[group.group_id] = group
            self._num_finished += len(group.rollouts)

    def _stop_if_hopeless(self, group: RolloutGroup) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= _MAX_FAILED_IN_A_ROW:
            why = next(rollout.failure for rollout in group.rollouts if rollout.failure)
            raise RolloutError(f"{self._failed_in_a_row} groups in a row failed; the last one: {why}")

    def _forget(self, num_rollouts: int, finished: int) -> None:
        """Take the rollouts of a dropped or failed group out of the counts that admission goes by."""
        self._num_started -= num_rollouts
        self._num_finished -= finished
