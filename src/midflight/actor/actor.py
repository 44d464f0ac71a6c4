"""The actor starts rollouts when the schedule says so, has them graded, and hands over whole groups.

The ledger counts; the actor holds the prompts, tokens and rewards that the ledger does not know. Group g is about
problem g, so a restarted actor asks the same questions with the same random numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from midflight.actor.ledger import Ledger
from midflight.errors import RequestError, RolloutError
from midflight.models.text import encode_prompt, response_text
from midflight.protocols import Environment, Generator, Grader, Tokenizer
from midflight.types import (
    ActorCheckpoint,
    ActorState,
    BatchChoice,
    ChosenBatch,
    Completion,
    FleetView,
    GeneratedTokens,
    GenerationRequest,
    GradedResponse,
    GroupId,
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


class Actor:
    def __init__(
        self,
        config: ActorConfig,
        generator: Generator,
        environment: Environment,
        grader: Grader,
        tokenizer: Tokenizer,
        checkpoint: ActorCheckpoint | None = None,
    ) -> None:
        """Goes on from `checkpoint`: open groups keep the rollouts it holds; what it does not hold is asked again."""
        self._config = config
        self._generator = generator
        self._environment = environment
        self._grader = grader
        self._tokenizer = tokenizer
        self.ledger = Ledger(config.batch_size, config.group_size, checkpoint.state if checkpoint else None)
        self._groups: dict[GroupId, RolloutGroup] = {}  # open or ready
        self._failed_in_a_row = self._filtered_in_a_row = 0
        self._restore(checkpoint.rollouts if checkpoint else ())

    # --- what others may know ---------------------------------------------------------------------------------

    def fleet(self, newest_version: int) -> FleetView:
        return self.ledger.fleet(self._generator.weight_version, newest_version, self._generator.num_engines)

    @property
    def state(self) -> ActorState:
        """A copy."""
        return self.ledger.snapshot()

    def open_rollouts(self) -> Iterator[Rollout]:
        """Of every group that was started and is not in a batch."""
        for group in self._groups.values():
            yield from group.rollouts

    def tokens_of(self, rollout: Rollout, start: int) -> GeneratedTokens:
        """What a rollout has generated so far, from its `start`-th token on."""
        if rollout.status is RolloutStatus.RUNNING and rollout.finish_reason is None:
            with contextlib.suppress(KeyError):  # it has just ended; `step` will say so
                return self._generator.generated(rollout.rollout_id, start)
        return rollout.generated.part(start)

    # --- verbs ------------------------------------------------------------------------------------------------

    def admit(self, num_rollouts: int) -> None:
        """Start so many rollouts, opening groups as needed."""
        for _ in range(num_rollouts):
            self._start(self._rollout(self.ledger.admit()))

    def step(self) -> None:
        """One token for everything in flight; what has ended goes to the grader."""
        completions = self._generator.step()
        for completion in sorted(completions, key=lambda completion: completion.rollout_id):
            self._finish(completion)

    def collect_grades(self, timeout_s: float = 0.0) -> None:
        """Take in what the grader has done; waits up to `timeout_s` for the first."""
        if self.ledger.num_ungraded:
            for graded in self._grader.results(timeout_s):
                self._take_grade(graded)

    def note_update(self) -> None:
        self.ledger.state.num_updates += 1

    def take(self, choice: BatchChoice) -> ChosenBatch | None:
        """Drop the groups that are to be dropped; return the next batch, None if nothing is to be trained on."""
        for group_id in choice.drop:
            self.ledger.drop(group_id, _lengths(self._groups.pop(group_id)))
        if not choice.train:
            return None
        generated_lengths, dropped_lengths = self.ledger.take(choice.train)
        groups = [self._groups.pop(group_id) for group_id in choice.train]
        state = self.state
        return ChosenBatch(state.num_batches - 1, groups, generated_lengths, dropped_lengths, {}, state)

    def abort(self) -> None:
        """Interrupt everything in flight; the partial rollouts are the first to be admitted again, oldest first."""
        self.ledger.state.num_aborted += self._interrupt()

    def stop(self) -> None:
        """Take everything out of the generator, with the tokens it has."""
        self._interrupt()

    # --- starting and ending rollouts -------------------------------------------------------------------------

    def _rollout(self, rollout_id: RolloutId) -> Rollout:
        """The ledger opens groups by their ids alone; here they get their problems."""
        group_id = GroupId(rollout_id // self._config.group_size)
        if group_id not in self._groups:
            self._groups[group_id] = self._new_group(group_id)
        return self._groups[group_id].rollouts[rollout_id % self._config.group_size]

    def _new_group(self, group_id: GroupId) -> RolloutGroup:
        problem = self._environment.problem(group_id)
        prompt = np.array(encode_prompt(self._tokenizer, problem.prompt), np.int32)
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
        try:
            self._generator.add([request])
        except RequestError as error:  # a prompt that is too long, say
            self._fail(rollout, f"{type(error).__name__}: {error}")
        else:
            rollout.status = RolloutStatus.RUNNING
            version = self._generator.weight_version
            num_versions = len({version, *rollout.generated.weight_versions.tolist()})
            self.ledger.started(rollout.rollout_id, num_versions, version)

    def _interrupt(self) -> int:
        completions = self._generator.abort(self.ledger.in_flight)
        for completion in completions:
            rollout = self._rollout(completion.rollout_id)
            self._take_tokens(rollout, completion)
            rollout.status = RolloutStatus.PARTIAL
            rollout.num_carried = len(rollout.generated)
        self.ledger.interrupted([completion.rollout_id for completion in completions])
        return len(completions)

    def _finish(self, completion: Completion) -> None:
        rollout = self._rollout(completion.rollout_id)
        self._take_tokens(rollout, completion)
        rollout.finish_reason = completion.finish_reason
        self.ledger.ended(rollout.rollout_id, len(rollout.generated))
        if np.isfinite(rollout.generated.logprobs).all():
            self._submit(rollout)
        else:
            self._fail(rollout, "the policy that sampled it has log-probabilities that are no numbers")

    def _take_tokens(self, rollout: Rollout, completion: Completion) -> None:
        self.ledger.state.generated_tokens += len(completion.generated) - len(rollout.generated)
        rollout.generated = completion.generated

    # --- grades -----------------------------------------------------------------------------------------------

    def _submit(self, rollout: Rollout) -> None:
        problem = self._groups[rollout.group_id].problem
        text = response_text(self._tokenizer, rollout.generated, rollout.finish_reason)
        self._grader.submit(rollout.rollout_id, problem, text)

    def _take_grade(self, graded: GradedResponse) -> None:
        rollout = self._rollout(graded.rollout_id)
        if graded.grade is None:
            self._fail(rollout, graded.failure)
            return
        self._failed_in_a_row = 0
        rollout.status = RolloutStatus.FINISHED
        rollout.reward, rollout.reward_components = graded.grade.reward, graded.grade.components
        self._done(rollout)

    def _fail(self, rollout: Rollout, why: str) -> None:
        """One failed rollout is data; an unbroken run of failures stops the run."""
        logger.warning("rollout %d of group %d failed: %s", rollout.rollout_id, rollout.group_id, why)
        rollout.status, rollout.failure = RolloutStatus.FAILED, why
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= _MAX_FAILED_IN_A_ROW:
            raise RolloutError(f"{self._failed_in_a_row} rollouts in a row failed; the last one: {why}")
        self._done(rollout)

    # --- closing groups ---------------------------------------------------------------------------------------

    def _done(self, rollout: Rollout) -> None:
        if not self.ledger.done(rollout.rollout_id):
            return
        group = self._groups[rollout.group_id]
        failures = [member.failure for member in group.rollouts if member.status is RolloutStatus.FAILED]
        if failures:
            del self._groups[group.group_id]
            self.ledger.fail(group.group_id, failures[0])
        elif self._config.dynamic_sampling and _has_no_signal(group):
            self._filter(group)
        else:
            self._filtered_in_a_row = 0
            self.ledger.make_ready(group.group_id)

    def _filter(self, group: RolloutGroup) -> None:
        del self._groups[group.group_id]
        self.ledger.filter(group.group_id, _lengths(group))
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= self._config.max_filtered_in_a_row:
            raise RolloutError(
                f"dynamic sampling: in {self._filtered_in_a_row} groups in a row all rewards were equal (the last:"
                f" {group.rollouts[0].reward:g}); the task is too easy or too hard for this model"
            )

    # --- going on after a restart -----------------------------------------------------------------------------

    def _restore(self, saved: Collection[Rollout]) -> None:
        by_group: defaultdict[GroupId, dict[RolloutId, Rollout]] = defaultdict(dict)
        for rollout in saved:
            by_group[rollout.group_id][rollout.rollout_id] = rollout
        for group_id in self.ledger.state.open_group_ids:
            group = self._groups[group_id] = self._new_group(group_id)
            members = by_group[group_id]
            group.rollouts = [
                replace(members.get(rollout.rollout_id, rollout), prompt_token_ids=rollout.prompt_token_ids)
                for rollout in group.rollouts
            ]
        for group in list(self._groups.values()):
            for rollout in group.rollouts:
                self._take_up(rollout)

    def _take_up(self, rollout: Rollout) -> None:
        if not rollout.is_done and rollout.finish_reason is None:
            # Of one that was running when its process was killed, the tokens since its start were never counted.
            self.ledger.state.generated_tokens += len(rollout.generated) - rollout.num_carried
            rollout.num_carried = len(rollout.generated)
            self.ledger.put_back(rollout.rollout_id)
            return
        self.ledger.took_over(rollout.rollout_id)
        if rollout.is_done:
            self._done(rollout)
        else:
            self._submit(rollout)


def _lengths(group: RolloutGroup) -> list[int]:
    return [len(rollout.generated) for rollout in group.rollouts]


def _has_no_signal(group: RolloutGroup) -> bool:
    return len({rollout.reward for rollout in group.rollouts}) == 1
