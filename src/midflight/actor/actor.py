"""The actor starts rollouts when the schedule asks for them, has them graded, and hands over whole groups.

The ledger counts; the actor holds prompts, tokens and rewards. Group g attempts problem g, so a restarted actor
generates for the same problems with the same random numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from midflight.actor.episodes import Episodes, turn_of
from midflight.actor.failures import RecentFailures
from midflight.actor.ledger import Ledger
from midflight.errors import RolloutError
from midflight.models.prompts import PromptFormat
from midflight.protocols import Environment, Generator, GradedTask, Grader
from midflight.types import (
    ActorCheckpoint,
    ActorState,
    BatchChoice,
    ChosenBatch,
    FleetView,
    GroupId,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutId,
    RolloutStatus,
    SamplingParams,
    Segment,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActorConfig:
    batch_size: int
    group_size: int
    sampling: SamplingParams
    seed: int
    max_length: int | None = None  # of a rollout: prompt and all turns (tokens); None: no limit
    dynamic_sampling: bool = False  # leave out and replace groups whose rewards are all equal (DAPO)
    max_filtered_in_a_row: int = 1024  # filtered groups in a row that end the run
    max_failed_fraction: float = 0.5  # share of the last rollouts; more failures end the run


class Actor:
    def __init__(
        self,
        config: ActorConfig,
        generator: Generator,
        environment: Environment | GradedTask,
        grader: Grader,
        prompts: PromptFormat,
        checkpoint: ActorCheckpoint | None = None,
        on_ready: Callable[[RolloutGroup], None] | None = None,
    ) -> None:
        """Continue from `checkpoint`: open groups keep the rollouts in it; their other members are generated again.

        `on_ready`: called with every group whose members are all done and which may be chosen for a batch.
        """
        self._config = config
        self._generator = generator
        self._environment = environment
        self._episodes = Episodes(
            generator,
            environment,
            grader,
            prompts,
            config.sampling,
            config.seed,
            config.max_length,
            group_of=lambda rollout: self._groups[rollout.group_id].rollouts,
        )
        self.ledger = Ledger(config.batch_size, config.group_size, checkpoint.state if checkpoint else None)
        self._groups: dict[GroupId, RolloutGroup] = {}  # open or ready
        self._on_ready = on_ready
        self._recent_failures = RecentFailures(config.max_failed_fraction)
        self._filtered_in_a_row = 0
        self._restore(checkpoint.rollouts if checkpoint else ())

    # --- state ------------------------------------------------------------------------------------------------

    def fleet(self, newest_version: int) -> FleetView:
        fleet = self.ledger.fleet(self._generator.weight_version, newest_version, self._generator.num_engines)
        return replace(fleet, num_ungraded=self.num_ungraded) if self._episodes.num_held else fleet

    @property
    def num_ungraded(self) -> int:
        """Number of rollouts with the environment; not those that wait for other members of their groups."""
        return self.ledger.num_ungraded - self._episodes.num_held

    @property
    def state(self) -> ActorState:
        """Copy of the actor's state."""
        return self.ledger.snapshot()

    def open_rollouts(self) -> Iterator[Rollout]:
        """Yield the rollouts of every group that was started and is not in a batch."""
        for group in self._groups.values():
            yield from group.rollouts

    def tokens_of(self, rollout: Rollout, start: int) -> list[Segment]:
        """Tokens after the rollout's prompt so far, without the first `start`."""
        return self._episodes.tokens_of(rollout, start)

    # --- verbs ------------------------------------------------------------------------------------------------

    def admit(self, num_rollouts: int) -> None:
        """Start `num_rollouts` rollouts, opening groups as needed."""
        rollouts = [self._rollout(self.ledger.admit()) for _ in range(num_rollouts)]
        self._episodes.start([(rollout, self._problem_of(rollout)) for rollout in rollouts])
        for rollout in rollouts:
            self._note(rollout)

    def step(self) -> None:
        """Sample one token for every rollout in flight; submit the responses of ended turns to the environment."""
        with self._counting_tokens():
            ended = self._episodes.step()
        for rollout in ended:
            self.ledger.ended(rollout.rollout_id)
            if rollout.status is RolloutStatus.FAILED:
                self._note(rollout)

    def collect_grades(self, timeout_s: float = 0.0) -> None:
        """Process the environment's answers; wait up to `timeout_s` for the first one."""
        if self.num_ungraded:
            for rollout in self._episodes.answers(timeout_s):
                self._note(rollout)

    def note_update(self) -> None:
        self.ledger.state.num_updates += 1

    def take(self, choice: BatchChoice) -> ChosenBatch | None:
        """Drop the groups that `choice` drops; return the next batch, or None if there is nothing to train on."""
        for group_id in choice.drop:
            self.ledger.drop(group_id, _lengths(self._groups.pop(group_id)))
        if not choice.train:
            return None
        generated_lengths, dropped_lengths = self.ledger.take(choice.train)
        groups = [self._groups.pop(group_id) for group_id in choice.train]
        state = self.state
        return ChosenBatch(state.num_batches - 1, groups, generated_lengths, dropped_lengths, {}, state)

    def abort(self) -> None:
        """Interrupt all rollouts in flight; the partial rollouts are admitted again first, oldest first."""
        self.ledger.state.num_aborted += self._interrupt()

    def stop(self) -> None:
        """Interrupt all rollouts in flight at the end of the run, keeping their tokens."""
        self._interrupt()

    # --- rollouts ---------------------------------------------------------------------------------------------

    def _rollout(self, rollout_id: RolloutId) -> Rollout:
        """Rollout with this id; a group that the ledger has just opened gets its problem here."""
        group_id = GroupId(rollout_id // self._config.group_size)
        if group_id not in self._groups:
            self._groups[group_id] = self._new_group(group_id)
        return self._groups[group_id].rollouts[rollout_id % self._config.group_size]

    def _new_group(self, group_id: GroupId) -> RolloutGroup:
        problem = self._environment.problem(group_id)
        first = group_id * self._config.group_size
        rollout_ids = [RolloutId(first + member) for member in range(self._config.group_size)]
        return RolloutGroup(group_id, problem, self._episodes.new_rollouts(problem, group_id, rollout_ids))

    def _problem_of(self, rollout: Rollout) -> Problem:
        return self._groups[rollout.group_id].problem

    @contextlib.contextmanager
    def _counting_tokens(self) -> Iterator[None]:
        before = self._episodes.num_generated
        yield
        self.ledger.state.generated_tokens += self._episodes.num_generated - before

    def _interrupt(self) -> int:
        with self._counting_tokens():
            interrupted = self._episodes.interrupt(self.ledger.in_flight)
        self.ledger.interrupted([rollout.rollout_id for rollout in interrupted])
        return len(interrupted)

    def _note(self, rollout: Rollout) -> None:
        """Report to the ledger that a rollout was started (for its first or a later turn) or is done."""
        if rollout.status is RolloutStatus.RUNNING:
            version = self._generator.weight_version
            versions = {version, *rollout.generated.weight_versions.tolist()}
            self.ledger.started(rollout.rollout_id, len(versions), version)
        elif rollout.status is RolloutStatus.FINISHED:
            self._recent_failures.note("")
            self._done(rollout)
        else:
            self._fail(rollout)

    def _fail(self, rollout: Rollout) -> None:
        """One failed rollout is data; too many failures end the run."""
        logger.warning("rollout %d of group %d failed: %s", rollout.rollout_id, rollout.group_id, rollout.failure)
        self._recent_failures.note(rollout.failure or "no reason")
        self._done(rollout)

    # --- closing groups ---------------------------------------------------------------------------------------

    def _done(self, rollout: Rollout) -> None:
        if not self.ledger.done(rollout.rollout_id, rollout.num_sampled):
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
            if self._on_ready:
                self._on_ready(group)

    def _filter(self, group: RolloutGroup) -> None:
        del self._groups[group.group_id]
        self.ledger.filter(group.group_id, _lengths(group))
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= self._config.max_filtered_in_a_row:
            raise RolloutError(
                f"dynamic sampling: in {self._filtered_in_a_row} groups in a row all rewards were equal (the last:"
                f" {group.rollouts[0].reward:g}); the task is too easy or too hard for this model"
            )

    # --- resuming after a restart -----------------------------------------------------------------------------

    def _restore(self, saved: Collection[Rollout]) -> None:
        by_group: defaultdict[GroupId, dict[RolloutId, Rollout]] = defaultdict(dict)
        for rollout in saved:
            by_group[rollout.group_id][rollout.rollout_id] = rollout
        for group_id in self.ledger.state.open_group_ids:
            group = self._groups[group_id] = self._new_group(group_id)
            members = by_group[group_id]
            group.rollouts = [
                _with_prompt(members[rollout.rollout_id], rollout.segments[0])
                if rollout.rollout_id in members
                else rollout
                for rollout in group.rollouts
            ]
        for group in list(self._groups.values()):
            for rollout in group.rollouts:
                self._take_up(rollout)

    def _take_up(self, rollout: Rollout) -> None:
        if not rollout.is_done and rollout.finish_reason is None:
            # If the process was killed, tokens sampled since the rollout was last started were never counted.
            num_before = rollout.num_sampled - len(turn_of(rollout))
            self.ledger.state.generated_tokens += rollout.num_sampled - max(rollout.num_carried, num_before)
            rollout.num_carried = rollout.num_sampled
            self.ledger.put_back(rollout.rollout_id)
        elif rollout.is_done:
            self.ledger.took_over(rollout.rollout_id)
            self._done(rollout)
        else:
            self.ledger.took_over(rollout.rollout_id, is_graded=False)
            self._episodes.submit(rollout, self._problem_of(rollout))


def _with_prompt(rollout: Rollout, prompt: Segment) -> Rollout:
    return replace(rollout, segments=[prompt, *rollout.segments[1:]])


def _lengths(group: RolloutGroup) -> list[int]:
    return [rollout.num_sampled for rollout in group.rollouts]


def _has_no_signal(group: RolloutGroup) -> bool:
    return len({rollout.reward for rollout in group.rollouts}) == 1
