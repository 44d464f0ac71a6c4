"""The actor starts rollouts when the schedule says so, has them graded, and hands over whole groups.

Invariants: every started group is in exactly one of open (not all members done), ready (graded, waiting to be
chosen), chosen, filtered, dropped or failed. Group g is about problem g, and rollout ids follow from group ids, so a
restarted actor asks the same questions with the same random numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from midflight.actor.grading import response_text
from midflight.actor.versions import VersionCounter
from midflight.errors import RequestError, RolloutError
from midflight.protocols import Environment, Generator, Grader, Schedule
from midflight.types import (
    ActorCheckpoint,
    ActorState,
    Completion,
    FleetView,
    GeneratedTokens,
    GenerationRequest,
    GradedResponse,
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActorConfig:
    batch_size: int
    group_size: int
    sampling: SamplingParams
    seed: int
    dynamic_sampling: bool = False  # groups whose rewards are all equal are left out and replaced (DAPO)
    max_filtered_in_a_row: int = 1024  # groups; the run ends after so many without one that is not


@dataclass(frozen=True, slots=True)
class ChosenGroups:
    """The groups of a batch, and the response lengths of everything that happened since the last one."""

    groups: list[RolloutGroup]
    generated_lengths: list[int]
    dropped_lengths: list[int]


class Actor:
    def __init__(
        self,
        config: ActorConfig,
        generator: Generator,
        schedule: Schedule,
        environment: Environment,
        grader: Grader,
        tokenizer: Any,
        checkpoint: ActorCheckpoint | None = None,
    ) -> None:
        """Goes on from `checkpoint`: open groups keep the rollouts it holds; what it does not hold is asked again."""
        self._config = config
        self._generator = generator
        self._schedule = schedule
        self._environment = environment
        self._grader = grader
        self._tokenizer = tokenizer
        self._state = replace(checkpoint.state) if checkpoint else ActorState()
        self._open: dict[GroupId, RolloutGroup] = {}
        self._ready: OrderedDict[GroupId, RolloutGroup] = OrderedDict()
        self._to_admit: deque[Rollout] = deque()
        self._running: dict[RolloutId, Rollout] = {}
        self._ungraded: dict[RolloutId, Rollout] = {}
        self._versions = VersionCounter()
        self._failed_in_a_row = self._filtered_in_a_row = 0
        self._num_started = self._num_finished = self._state.num_batches * config.batch_size
        self._restore(checkpoint.rollouts if checkpoint else ())

    # --- what others may know ---------------------------------------------------------------------------------

    def fleet(self, newest_version: int) -> FleetView:
        version = self._generator.weight_version
        return FleetView(
            version=version,
            newest_version=newest_version,
            num_batches=self._state.num_batches,
            num_started=self._num_started,
            num_engines=self._generator.num_engines,
            num_in_flight=self.num_in_flight,
            num_ungraded=self.num_ungraded,
            num_finished=self._num_finished,
            most_versions_in_flight=self._versions.most(version),
            oldest_open_group=min(self._open, default=None),
        )

    @property
    def state(self) -> ActorState:
        """A copy."""
        state = self._state
        return replace(
            state,
            open_group_ids=sorted([*self._open, *self._ready]),
            generated_lengths=state.generated_lengths.copy(),
            dropped_lengths=state.dropped_lengths.copy(),
        )

    @property
    def num_in_flight(self) -> int:
        """Rollouts being generated."""
        return len(self._running)

    @property
    def num_ready(self) -> int:
        """Rollouts that wait to be chosen."""
        return sum(len(group.rollouts) for group in self._ready.values())

    @property
    def num_ungraded(self) -> int:
        return len(self._ungraded)

    def open_rollouts(self) -> Iterator[Rollout]:
        """Of every group that was started and is not in a batch."""
        for group in (*self._open.values(), *self._ready.values()):
            yield from group.rollouts

    def tokens_of(self, rollout: Rollout, start: int) -> GeneratedTokens:
        """What a rollout has generated so far, from its `start`-th token on."""
        if rollout.rollout_id in self._running:
            with contextlib.suppress(KeyError):  # it has just ended; `step` will say so
                return self._generator.generated(rollout.rollout_id, start)
        return rollout.generated.part(start)

    # --- verbs ------------------------------------------------------------------------------------------------

    def admit(self, fleet: FleetView) -> None:
        """Start as many rollouts as the schedule wants, opening groups as needed."""
        for _ in range(self._schedule.num_to_admit(fleet)):
            if not self._to_admit:
                self._open_group()
            self._start(self._to_admit.popleft())

    def step(self) -> None:
        """One token for everything in flight; what has ended goes to the grader."""
        completions = self._generator.step()
        for completion in sorted(completions, key=lambda completion: completion.rollout_id):
            self._finish(completion)

    def collect_grades(self, timeout_s: float = 0.0) -> None:
        """Take in what the grader has done; waits up to `timeout_s` for the first."""
        if self._ungraded:
            for graded in self._grader.results(timeout_s):
                self._take_grade(graded)

    def note_update(self) -> None:
        self._state.num_updates += 1

    def choose_batch(self, fleet: FleetView) -> ChosenGroups | None:
        """The groups of the next batch, taken out of the ready queue; None if it is not time."""
        ready = [ReadyGroup(group_id, len(group.rollouts)) for group_id, group in self._ready.items()]
        choice = self._schedule.choose_batch(fleet, ready)
        if choice is None:
            return None
        for group_id in choice.drop:
            self._state.num_dropped_groups += 1
            group = self._ready.pop(group_id)
            self._num_finished -= len(group.rollouts)
            self._drop(group)
        if not choice.train:
            return None
        self._state.num_batches += 1
        chosen = ChosenGroups(
            [self._ready.pop(group_id) for group_id in choice.train],
            self._state.generated_lengths,
            self._state.dropped_lengths,
        )
        self._state.generated_lengths, self._state.dropped_lengths = [], []
        return chosen

    def abort(self) -> None:
        """Interrupt everything in flight; the partial rollouts are the first to be admitted again, oldest first."""
        self._state.num_aborted += self._suspend()

    def stop(self) -> None:
        """Take everything out of the generator, with the tokens it has."""
        self._suspend()

    # --- starting and ending rollouts -------------------------------------------------------------------------

    def _open_group(self) -> None:
        group = self._new_group(self._state.next_group_id)
        self._state.next_group_id = GroupId(group.group_id + 1)
        self._open[group.group_id] = group
        self._to_admit.extend(group.rollouts)

    def _new_group(self, group_id: GroupId) -> RolloutGroup:
        problem = self._environment.problem(group_id)
        prompt = np.array(self._tokenizer.encode(problem.prompt), np.int32)
        first = group_id * self._config.group_size
        rollouts = [
            Rollout(RolloutId(first + member), group_id, RolloutStatus.PARTIAL, prompt, GeneratedTokens.none())
            for member in range(self._config.group_size)
        ]
        return RolloutGroup(group_id, problem, rollouts)

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
            self._fail(rollout, f"{type(error).__name__}: {error}")
        else:
            rollout.status = RolloutStatus.RUNNING
            self._running[rollout.rollout_id] = rollout
            self._versions.started(rollout, self._generator.weight_version)

    def _suspend(self) -> int:
        completions = self._generator.abort(list(self._running))
        suspended = [self._running.pop(completion.rollout_id) for completion in completions]
        for rollout, completion in zip(suspended, completions, strict=True):
            self._versions.ended(rollout)
            self._take_tokens(rollout, completion)
            rollout.status = RolloutStatus.PARTIAL
            rollout.num_carried = len(rollout.generated)
        self._to_admit.extendleft(sorted(suspended, key=lambda rollout: -rollout.rollout_id))
        self._num_started -= len(suspended)
        return len(suspended)

    def _finish(self, completion: Completion) -> None:
        rollout = self._running.pop(completion.rollout_id)
        self._versions.ended(rollout)
        self._take_tokens(rollout, completion)
        rollout.finish_reason = completion.finish_reason
        self._state.generated_lengths.append(len(rollout.generated))
        if np.isfinite(rollout.generated.logprobs).all():
            self._submit(rollout)
        else:
            self._fail(rollout, "the policy that sampled it has log-probabilities that are no numbers")

    def _take_tokens(self, rollout: Rollout, completion: Completion) -> None:
        self._state.generated_tokens += len(completion.generated) - len(rollout.generated)
        rollout.generated = completion.generated

    # --- grades -----------------------------------------------------------------------------------------------

    def _submit(self, rollout: Rollout) -> None:
        self._ungraded[rollout.rollout_id] = rollout
        problem = self._open[rollout.group_id].problem
        text = response_text(self._tokenizer, rollout.generated, rollout.finish_reason)
        self._grader.submit(rollout.rollout_id, problem, text)

    def _take_grade(self, graded: GradedResponse) -> None:
        rollout = self._ungraded.pop(graded.rollout_id)
        if graded.grade is None:
            self._fail(rollout, graded.failure)
            return
        self._failed_in_a_row = 0
        rollout.status = RolloutStatus.FINISHED
        rollout.reward, rollout.reward_components = graded.grade.reward, graded.grade.components
        self._close_if_done(self._open[rollout.group_id])

    def _fail(self, rollout: Rollout, why: str) -> None:
        """A bad rollout is data, not a crash; nothing but bad ones is."""
        logger.warning("rollout %d of group %d failed: %s", rollout.rollout_id, rollout.group_id, why)
        rollout.status, rollout.failure = RolloutStatus.FAILED, why
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= _MAX_FAILED_IN_A_ROW:
            raise RolloutError(f"{self._failed_in_a_row} rollouts in a row failed; the last one: {why}")
        self._close_if_done(self._open[rollout.group_id])

    # --- closing groups ---------------------------------------------------------------------------------------

    def _close_if_done(self, group: RolloutGroup) -> None:
        if not all(rollout.is_done for rollout in group.rollouts):
            return
        del self._open[group.group_id]
        if any(rollout.status is RolloutStatus.FAILED for rollout in group.rollouts):
            self._state.num_failed_groups += 1
            self._num_started -= len(group.rollouts)
        elif self._config.dynamic_sampling and _has_no_signal(group):
            self._filter(group)
        else:
            self._filtered_in_a_row = 0
            self._ready[group.group_id] = group
            self._num_finished += len(group.rollouts)

    def _filter(self, group: RolloutGroup) -> None:
        self._state.num_filtered_groups += 1
        self._drop(group)
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= self._config.max_filtered_in_a_row:
            raise RolloutError(
                f"dynamic sampling: in {self._filtered_in_a_row} groups in a row all rewards were equal (the last:"
                f" {group.rollouts[0].reward:g}); the task is too easy or too hard for this model"
            )

    def _drop(self, group: RolloutGroup) -> None:
        """A rule the user chose: out of the counts that admission goes by, so that another takes its place."""
        self._num_started -= len(group.rollouts)
        self._state.dropped_lengths += [len(rollout.generated) for rollout in group.rollouts]

    # --- going on after a restart -----------------------------------------------------------------------------

    def _restore(self, saved: Collection[Rollout]) -> None:
        by_group: defaultdict[GroupId, dict[RolloutId, Rollout]] = defaultdict(dict)
        for rollout in saved:
            by_group[rollout.group_id][rollout.rollout_id] = rollout
        for group_id in self._state.open_group_ids:
            group = self._new_group(group_id)
            members = by_group[group_id]
            group.rollouts = [
                replace(members.get(rollout.rollout_id, rollout), prompt_token_ids=rollout.prompt_token_ids)
                for rollout in group.rollouts
            ]
            self._open[group_id] = group
        for group in list(self._open.values()):
            for rollout in group.rollouts:
                self._take_up(rollout)
            self._close_if_done(group)

    def _take_up(self, rollout: Rollout) -> None:
        if not rollout.is_done and rollout.finish_reason is None:
            # Of one that was running when its process was killed, the tokens since its start were never counted.
            self._state.generated_tokens += len(rollout.generated) - rollout.num_carried
            rollout.num_carried = len(rollout.generated)
            self._to_admit.append(rollout)
            return
        self._num_started += 1
        if not rollout.is_done:
            self._submit(rollout)


def _has_no_signal(group: RolloutGroup) -> bool:
    return len({rollout.reward for rollout in group.rollouts}) == 1
