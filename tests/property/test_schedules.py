"""Guarantees of every schedule under random lengths, delays, failures and kills, on a virtual clock.

A tick is one iteration of the real rollout loop. Optimizer steps and grades take a number of ticks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from midflight.actor.actor import Actor, ActorConfig
from midflight.actor.loop import Intervals, RolloutLoop
from midflight.actor.partials import PartialBuffer
from midflight.metrics.lengths import length_bias
from midflight.models.prompts import PromptFormat
from midflight.preprocess.advantages import group_mean
from midflight.preprocess.batches import Preprocessing
from midflight.preprocess.loop import PreprocessAtOnce, Preprocessor
from midflight.protocols import Generator, Schedule
from midflight.run.resuming import restored_actor
from midflight.schedules.april import AprilSchedule
from midflight.schedules.batches import take_batch
from midflight.schedules.bounded import BoundedSchedule
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule
from midflight.streams.memory import MemoryStream
from midflight.testing.fakes import CountingEnvironment, DigitTokenizer, ImmediateGrader, ScriptedGenerator
from midflight.tracing.spans import Tracer
from midflight.trainer.state import TrainerState
from midflight.types import (
    BatchChoice,
    ChosenBatch,
    FleetView,
    Grade,
    Problem,
    ReadyGroup,
    Rollout,
    RolloutGroup,
    RolloutId,
    SamplingParams,
    TrainingBatch,
)
from soak import SOAK

GROUP_SIZE = 2
NUM_STEPS = 12


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Hide the log lines of thousands of rollouts that fail on purpose."""
    caplog.set_level(logging.ERROR)


@dataclass(frozen=True)
class World:
    """Conditions a schedule cannot know. Lists repeat, indexed by rollout or by optimizer step."""

    lengths: list[int]
    train_ticks: list[int]
    grade_ticks: list[int]
    update_ticks: int = 0
    replaces: bool = True  # a version asked for during an update replaces the older one, or comes after it
    failing: frozenset[int] = frozenset()  # groups
    no_signal: frozenset[int] = frozenset()  # groups whose rewards are all equal
    grades_groups: bool = False  # all responses of a group are graded together

    def length_of(self, rollout: int) -> int:
        return self.lengths[rollout % len(self.lengths)]


groups = st.frozensets(st.integers(0, 30), max_size=6)
worlds = st.builds(
    World,
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    train_ticks=st.lists(st.integers(1, 25), min_size=1, max_size=8),
    grade_ticks=st.lists(st.sampled_from([0, 0, 0, 1, 7, 40]), min_size=1, max_size=7),
    update_ticks=st.sampled_from([0, 0, 1, 4, 30]),
    replaces=st.booleans(),
    failing=groups,
    no_signal=groups,
    grades_groups=st.booleans(),
)
batch_groups = st.integers(1, 3)
# New weights arrive several ticks before they sample; admission must depend on the weights that sample.
slow_updates = World(lengths=[5], train_ticks=[3], grade_ticks=[0], update_ticks=4, replaces=False)


class Verifier(CountingEnvironment):
    """Environment with alternating rewards 1 and 0, equal rewards for `no_signal` groups, errors for `failing` ones."""

    def __init__(self, world: World, group_sizes: set[int]) -> None:
        """Add the number of responses of each graded group to `group_sizes`."""
        self._group_sizes = group_sizes
        self.wants_groups = world.grades_groups
        self._num_graded = Counter[int]()

        def reward_of(index: int) -> float:
            if index in world.failing:
                raise RuntimeError("the verifier broke")
            self._num_graded[index] += 1
            return 1.0 if index in world.no_signal else float(self._num_graded[index] % 2)

        super().__init__(reward_of)

    def grade_group(self, problem: Problem, responses: Sequence[str]) -> list[Grade]:
        self._group_sizes.add(len(responses))
        return [self.grade(problem, response) for response in responses]


class Recording(Actor):
    """Actor that records the groups of every batch it hands over."""

    handed_over: list[list[RolloutGroup]]

    def take(self, choice: BatchChoice) -> ChosenBatch | None:
        chosen = super().take(choice)
        if chosen:
            self.handed_over.append(chosen.groups)
        return chosen


class Versions:
    """The versions that the trainer has published."""

    def __init__(self) -> None:
        self.version = 0

    def newest_version(self) -> int:
        return self.version

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        return False

    def close(self) -> None: ...


class Run:
    """A schedule in a world: the real actor and rollout loop, a scripted generator, a trainer that only counts."""

    def __init__(
        self,
        schedule: Schedule,
        batch_size: int,
        world: World,
        *,
        dynamic_sampling: bool = False,
        partials: PartialBuffer | None = None,
        group_size: int = GROUP_SIZE,
        num_steps: int = NUM_STEPS,
        capacity: int = 100_000,
    ) -> None:
        sampling = SamplingParams(max_tokens=1_000_000)
        self.config = ActorConfig(batch_size, group_size, sampling, seed=0, dynamic_sampling=dynamic_sampling)
        self.schedule, self.world, self.partials, self.num_steps = schedule, world, partials, num_steps
        self.receiver = Versions()
        self.stream: MemoryStream[TrainingBatch] = MemoryStream(capacity)
        self.checkpoint = TrainerState()
        self.batches: list[list[RolloutGroup]] = []
        self.group_sizes: set[int] = set()
        self.tick = 0
        self.most_in_flight = 0
        self._done_at = 0
        self.start()

    def start(self) -> None:
        """Start the rollout process from the saved state of an earlier one."""
        environment = Verifier(self.world, self.group_sizes)
        delays = self.world.grade_ticks
        grader = ImmediateGrader(environment, lambda rollout: delays[rollout % len(delays)])
        self.generator = self.make_generator()
        checkpoint = restored_actor(self.partials, [self.stream], self.checkpoint) if self.partials else None
        self.actor = Recording(
            self.config, self.generator, environment, grader, PromptFormat(DigitTokenizer()), checkpoint
        )
        self.actor.handed_over = self.batches
        preprocessing = Preprocessing(group_mean, max_tokens=1 << 30, max_response_tokens=1 << 30)
        tracer = Tracer(None, "test")
        self.loop = RolloutLoop(
            self.actor,
            self.generator,
            self.schedule,
            self.receiver,
            PreprocessAtOnce(self.stream, Preprocessor(preprocessing, tracer)),
            tracer,
            intervals=Intervals(grades_s=0),
        )

    def make_generator(self) -> Generator:
        generator = ScriptedGenerator(self.world.length_of, self.world.update_ticks, self.world.replaces)
        generator.weight_version = self.receiver.version
        return generator

    def save(self) -> None:
        assert self.partials is not None
        self.partials.save(self.actor.state, self.actor.open_rollouts(), self.actor.tokens_of)

    def lose_batches(self, num_batches: int) -> None:
        """Simulate a power loss: remove the newest batches and return the trainer to a checkpoint before them."""
        self.save()
        end = self.stream.next_offset() - num_batches
        state = self.stream.read(end - 1)[0].actor_state
        self.checkpoint = TrainerState(version=end, actor=state)
        self.stream.skip_to(end)
        del self.batches[end:]
        self.receiver.version, self._done_at = end, 0
        self.start()

    def iteration(self) -> None:
        self.loop.iteration(self.receiver.version)
        self.most_in_flight = max(self.most_in_flight, self.actor.ledger.num_in_flight)
        self.tick += 1
        if len(self.batches) > self.receiver.version:
            ticks = self.world.train_ticks[self.receiver.version % len(self.world.train_ticks)]
            if not self._done_at:
                self.stream.read(self.receiver.version, timeout_s=0)
                self._done_at = self.tick + ticks
            if self.tick >= self._done_at:
                self.receiver.version += 1
                self._done_at = 0

    def finish(self) -> Self:
        """Run until all steps are trained."""
        while self.receiver.version < self.num_steps:
            self.iteration()
            assert self.tick < 3000 * self.num_steps, (
                f"stuck at version {self.receiver.version}, {len(self.batches)} batches"
            )
        return self

    @property
    def trained(self) -> list[RolloutGroup]:
        return [group for batch in self.batches[: self.num_steps] for group in batch]

    def lags(self) -> list[int]:
        return [
            index - int(version)
            for index, batch in enumerate(self.batches)
            for rollout in members(batch)
            for version in rollout.generated.weight_versions
        ]

    def check_accounts(self) -> None:
        """Check that every started group is in one batch or in one counter, and that sequences are complete."""
        state = self.actor.state
        batched = Counter(group.group_id for batch in self.batches for group in batch)
        assert set(batched.values()) <= {1}, "a group is in two batches"
        assert self.group_sizes == ({self.config.group_size} if self.world.grades_groups else set())
        assert not batched.keys() & self.world.failing
        assert all(len(members(batch)) == self.config.batch_size for batch in self.batches)
        lost = state.num_failed_groups + state.num_filtered_groups + state.num_dropped_groups
        assert state.next_group_id == len(batched) + lost + len(state.open_group_ids)
        assert not batched.keys() & set(state.open_group_ids)
        for rollout in (member for batch in self.batches for member in members(batch)):
            assert len(rollout.generated) == self.world.length_of(rollout.rollout_id)
            assert (np.diff(rollout.generated.weight_versions) >= 0).all(), (
                "a weight version decreased within a sequence"
            )

    def lengths(self, kind: str) -> Counter[int]:
        """Return the `generated`, `trained` or `dropped` lengths recorded in the batches."""
        records = self.stream.read(0, self.stream.next_offset())
        return Counter(length for record in records for length in getattr(record, f"{kind}_lengths").tolist())


def members(batch: list[RolloutGroup]) -> list[Rollout]:
    return [rollout for group in batch for rollout in group.rollouts]


@pytest.mark.slow
@given(worlds, st.integers(1, 4), batch_groups)
def test_conventional_lag_bound(world: World, steps_per_rl_step: int, num_groups: int) -> None:
    batch_size = num_groups * GROUP_SIZE
    run = Run(ConventionalSchedule(batch_size, steps_per_rl_step), batch_size, world).finish()
    assert max(run.lags()) <= steps_per_rl_step - 1
    assert run.actor.state.num_updates <= NUM_STEPS // steps_per_rl_step, "weights were updated within an RL step"
    run.check_accounts()


@example(world=slow_updates, max_lag=1, num_groups=1, num_in_flight=9, when_full="block")
@given(worlds, st.integers(0, 5), batch_groups, st.integers(1, 9), st.sampled_from(["block", "drop_oldest"]))
def test_pipeline_lag_bound(world: World, max_lag: int, num_groups: int, num_in_flight: int, when_full: str) -> None:
    batch_size = num_groups * GROUP_SIZE
    schedule = PipelineSchedule(batch_size, num_in_flight, batch_size, max_lag, when_full)  # type: ignore[arg-type]
    run = Run(schedule, batch_size, world).finish()
    assert max(run.lags()) <= max_lag
    run.check_accounts()


@pytest.mark.slow
@example(world=slow_updates, max_lag=1, num_groups=1, updates="in_flight", num_in_flight=9)
@given(worlds, st.integers(0, 5), batch_groups, st.sampled_from(["in_flight", "boundary"]), st.integers(1, 9))
def test_bounded_lag_bound(world: World, max_lag: int, num_groups: int, updates: str, num_in_flight: int) -> None:
    batch_size = num_groups * GROUP_SIZE
    for limit in (None, num_in_flight):
        schedule = BoundedSchedule(batch_size, max_lag, updates, limit)  # type: ignore[arg-type]
        run = Run(schedule, batch_size, world).finish()
        assert max(run.lags()) <= max_lag
        run.check_accounts()
        assert run.most_in_flight <= schedule.max_in_flight
        if updates == "boundary":
            assert all(len(set(rollout.generated.weight_versions.tolist())) == 1 for rollout in members(run.trained))


@pytest.mark.slow
@given(worlds, batch_groups, st.floats(1, 4), st.none() | st.integers(1, 3), st.none() | st.integers(1, 9))
def test_april_loses_no_token_and_bounds_versions_per_rollout(
    world: World, num_groups: int, over_sampling: float, max_versions: int | None, num_in_flight: int | None
) -> None:
    batch_size = num_groups * GROUP_SIZE
    schedule = AprilSchedule(batch_size, GROUP_SIZE, over_sampling, max_versions, num_in_flight)
    run = Run(schedule, batch_size, world).finish()
    run.check_accounts()
    assert run.most_in_flight <= schedule.max_in_flight
    # No token was generated twice: resumed rollouts keep what they have.
    state = run.actor.state
    on_hand = [part for rollout in run.actor.open_rollouts() for part in run.actor.tokens_of(rollout, 0)]
    batched = [rollout.generated for batch in run.batches for rollout in members(batch)]
    if not world.failing:
        assert state.generated_tokens == sum(map(len, on_hand)) + sum(map(len, batched)) - sum(
            len(run.generator.generated(rollout)) - carried for rollout, carried in run_in_flight(run)
        )
    if max_versions is not None:
        assert max(len(set(tokens.weight_versions.tolist())) for tokens in batched) <= max_versions


def run_in_flight(run: Run) -> list[tuple[RolloutId, int]]:
    """Return the id of every rollout in flight, and the number of its tokens that are already counted."""
    return [
        (rollout.rollout_id, len(rollout.generated))
        for rollout in run.actor.open_rollouts()
        if rollout.rollout_id in run.actor.ledger.in_flight
    ]


@pytest.mark.slow
@given(worlds, batch_groups, st.integers(1, 9), st.sampled_from(["block", "drop_oldest"]), st.integers(1, 3))
def test_pipeline_queue_respects_its_capacity(
    world: World, num_groups: int, num_in_flight: int, when_full: str, num_batches: int
) -> None:
    batch_size = num_groups * GROUP_SIZE
    queue_capacity = num_batches * batch_size
    schedule = PipelineSchedule(batch_size, num_in_flight, queue_capacity, when_full=when_full)  # type: ignore[arg-type]
    run = Run(schedule, batch_size, world)
    while run.receiver.version < NUM_STEPS:
        version, num_dropped = run.receiver.version, run.actor.state.num_dropped_groups
        num_ungraded = run.actor.ledger.num_ungraded
        run.iteration()
        if run.actor.state.num_dropped_groups > num_dropped:
            fleet = run.actor.fleet(version)
            waiting = fleet.num_finished - min(fleet.num_batches, version + 1) * batch_size
            assert waiting > queue_capacity - GROUP_SIZE, "more groups were dropped than necessary"
        fleet = run.actor.fleet(run.receiver.version)
        waiting = fleet.num_finished - min(fleet.num_batches, fleet.newest_version + 1) * batch_size
        assert fleet.num_in_flight <= num_in_flight
        if when_full == "drop_oldest":
            # The next iteration notices the end of a step. With nothing in flight, this one ended in a wait for grades,
            # which the next one handles: at most those of rollouts that were ungraded or in flight before it.
            late = 0 if fleet.num_in_flight else num_ungraded + num_in_flight
            assert waiting <= queue_capacity + batch_size + late
            assert fleet.num_batches <= fleet.newest_version + 1, (
                "a batch was chosen before the trainer was ready for it"
            )
        else:
            # Rollouts in flight, in grading or waiting for siblings when the queue fills up are still completed.
            assert waiting <= queue_capacity + num_in_flight * (1 + max(world.grade_ticks)) + GROUP_SIZE
    run.check_accounts()
    assert (run.actor.state.num_dropped_groups > 0) <= (when_full == "drop_oldest")


SCHEDULES: dict[str, Schedule] = {
    "conventional": ConventionalSchedule(4, steps_per_rl_step=2),
    "pipeline": PipelineSchedule(4, num_in_flight=6, queue_capacity=8),
    "pipeline, max_lag": PipelineSchedule(4, num_in_flight=6, queue_capacity=8, max_lag=2),
    "pipeline, drop_oldest": PipelineSchedule(4, num_in_flight=6, queue_capacity=4, when_full="drop_oldest"),
    "april": AprilSchedule(4, GROUP_SIZE, over_sampling=1.5),
    "bounded": BoundedSchedule(4, max_lag=2),
    "one_step_off": BoundedSchedule(4, max_lag=1, updates="boundary"),
}
each_schedule = pytest.mark.parametrize("name", SCHEDULES)


RUN_AHEAD: dict[str, Schedule] = {  # schedules that hand over many batches before the trainer takes one
    "conventional": ConventionalSchedule(4, steps_per_rl_step=8),
    "pipeline": PipelineSchedule(4, num_in_flight=6, queue_capacity=40),
    "pipeline, max_lag": PipelineSchedule(4, num_in_flight=6, queue_capacity=40, max_lag=8),
    "bounded": BoundedSchedule(4, max_lag=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES | RUN_AHEAD)
@given(worlds)
@settings(max_examples=15 * SOAK)
def test_a_full_stream_changes_no_batch(name: str, world: World) -> None:
    """Batches without room wait in the rollout process, and no schedule deadlocks.

    Grades are immediate: an iteration that hands nothing over may wait for grades, which would then arrive earlier.
    """
    world = replace(world, grade_ticks=[0])
    schedule = (SCHEDULES | RUN_AHEAD)[name]
    roomy, tight = (Run(schedule, 4, world, capacity=capacity).finish() for capacity in (100_000, 3))
    assert len(tight.batches) <= NUM_STEPS + 1
    assert tight.tick == roomy.tick
    for one, other in zip(tight.batches, roomy.batches, strict=False):
        assert [group.group_id for group in one] == [group.group_id for group in other]
        for ours, theirs in zip(members(one), members(other), strict=True):
            assert ours.generated.weight_versions.tolist() == theirs.generated.weight_versions.tolist()
    tight.check_accounts()


@pytest.mark.parametrize("name", RUN_AHEAD)
def test_schedules_may_run_ahead_of_the_stream_capacity(name: str) -> None:
    world = World(lengths=[3], train_ticks=[25], grade_ticks=[0])
    assert len(Run(RUN_AHEAD[name], 4, world).finish().batches) > NUM_STEPS + 2
    assert len(Run(RUN_AHEAD[name], 4, world, capacity=2).finish().batches) == NUM_STEPS


@each_schedule
@pytest.mark.slow
@given(worlds)
@settings(max_examples=40 * SOAK)
def test_groups_without_signal_are_replaced(name: str, world: World) -> None:
    run = Run(SCHEDULES[name], 4, world, dynamic_sampling=True).finish()
    run.check_accounts()
    assert not {group.group_id for group in run.trained} & world.no_signal
    closed = set(range(run.actor.state.next_group_id)) - set(run.actor.state.open_group_ids)
    if not run.actor.state.num_dropped_groups:
        assert run.actor.state.num_filtered_groups == len(closed & (world.no_signal - world.failing))


@each_schedule
@pytest.mark.slow
@given(world=worlds, kills=st.lists(st.integers(1, 60), max_size=5), save_every=st.integers(1, 15))
@settings(max_examples=40 * SOAK, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_killed_rollout_process_trains_each_group_once(
    name: str, world: World, kills: list[int], save_every: int, tmp_path: Path
) -> None:
    """The process is killed at any tick and resumes from its buffer and the stream."""
    path = tmp_path / "partials.sqlite"
    path.unlink(missing_ok=True)
    partials = PartialBuffer(path)
    run = Run(SCHEDULES[name], 4, world, partials=partials)
    for ticks in kills:
        for _ in range(ticks):
            run.iteration()
            if run.tick % save_every == 0:
                run.save()
        partials.close()
        partials = run.partials = PartialBuffer(path)
        run.start()
    run.finish().check_accounts()
    partials.close()
    trained = Counter(len(rollout.generated) for rollout in members(run.trained))
    assert not trained - (run.lengths("generated") + Counter(run.actor.state.generated_lengths))
    if isinstance(SCHEDULES[name], BoundedSchedule):
        assert max(run.lags()) <= 2


@each_schedule
@pytest.mark.slow
@given(world=worlds, num_trained=st.integers(4, 9), num_lost=st.integers(1, 3))
@settings(max_examples=40 * SOAK, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lost_batches_leave_no_token_of_lost_versions(
    name: str, world: World, num_trained: int, num_lost: int, tmp_path: Path
) -> None:
    path = tmp_path / "partials.sqlite"
    path.unlink(missing_ok=True)
    run = Run(SCHEDULES[name], 4, world, partials=PartialBuffer(path))
    while run.receiver.version < num_trained:
        run.iteration()
    run.lose_batches(num_lost)
    run.finish().check_accounts()
    assert min(run.lags()) >= 0
    assert run.partials
    run.partials.close()


def test_saved_tokens_are_restored_after_a_kill(tmp_path: Path) -> None:
    world = World(lengths=[50], train_ticks=[1], grade_ticks=[0])
    run = Run(SCHEDULES["pipeline"], 4, world, partials=PartialBuffer(tmp_path / "partials.sqlite"))
    for _ in range(30):
        run.iteration()
    run.save()
    assert run.partials
    run.partials.close()
    run.partials = PartialBuffer(tmp_path / "partials.sqlite")
    run.start()
    for _ in range(20):
        run.iteration()
    first = run.batches[0]
    assert [rollout.num_carried for rollout in members(first)] == [30] * 4
    assert run.actor.state.generated_tokens == 6 * 50


def test_an_admission_limit_alone_does_not_bound_the_lag() -> None:
    """Under max_lag, batches are taken in start order; batches in finish order break the bound."""

    @dataclass(frozen=True, slots=True)
    class FinishOrder(PipelineSchedule):
        def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
            return take_batch(ready, self.batch_size)

    world = World(lengths=[40, 1, 1, 1, 1, 1, 1, 1, 1, 1], train_ticks=[1], grade_ticks=[0])
    assert max(Run(PipelineSchedule(2, 8, 64, max_lag=2), 2, world, num_steps=30).finish().lags()) <= 2
    assert max(Run(FinishOrder(2, 8, 64, max_lag=2), 2, world, num_steps=30).finish().lags()) > 2


def test_april_keeps_surplus_finished_groups() -> None:
    """Surplus finished groups count as held: a schedule that drops them starves long rollouts."""

    @dataclass(frozen=True, slots=True)
    class DropSurplus(AprilSchedule):
        def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
            choice = AprilSchedule.choose_batch(self, fleet, ready)
            if choice is None:
                return None
            surplus = tuple(group.group_id for group in ready if group.group_id not in choice.train)
            return replace(choice, drop=surplus)

    world = World(lengths=[1, 1, 1, 9], train_ticks=[1], grade_ticks=[0])
    run = Run(AprilSchedule(2, 1, 2.0), 2, world, group_size=1).finish()
    assert run.actor.state.num_dropped_groups == 0
    dropping = Run(DropSurplus(2, 1, 2.0), 2, world, group_size=1).finish()
    assert dropping.actor.state.num_dropped_groups > 0
    long = [rollout for rollout in members(run.trained) if world.length_of(rollout.rollout_id) == 9]
    assert len(long) >= NUM_STEPS * 2 // 4 - 2, "long rollouts were starved"


def test_april_refills_in_one_admission() -> None:
    """This holds even with nothing in flight and grades that arrive one by one."""
    admitted: list[int] = []

    class Observed(AprilSchedule):
        def num_to_admit(self, fleet: FleetView) -> int:
            num_new = super().num_to_admit(fleet)
            admitted.append(num_new)
            return num_new

    world = World(
        lengths=[3], train_ticks=[1], grade_ticks=[0, 5, 10, 15, 20, 25, 30, 35], no_signal=frozenset(range(3))
    )
    schedule = Observed(4, GROUP_SIZE, over_sampling=2.0, refill="over_sampled")
    Run(schedule, 4, world, dynamic_sampling=True, num_steps=1).finish()
    assert [num_new for num_new in admitted if num_new] == [8, 8]


def test_april_trains_first_finished_and_resumes_oldest() -> None:
    """Hold two groups of two and train one per step, computed by hand (ticks of each iteration: 4, 4, 1)."""
    world = World(lengths=[9, 2, 4, 1, 3, 3, 1, 1], train_ticks=[1], grade_ticks=[0])
    run = Run(AprilSchedule(2, 2, 2.0), 2, world, num_steps=3).finish()
    # Groups 0 (9, 2) and 1 (4, 1): 1 is complete after 4 ticks, group 0 has 4 + 2 tokens. Held next: 0 and 2 (3, 3).
    # 2 is complete after 3 ticks. Then 0, with 7 of 9 tokens, and 3 (1, 1), which is first.
    assert [[group.group_id for group in batch] for batch in run.batches[:3]] == [[1], [2], [3]]
    first = next(run.actor.open_rollouts())
    (response,) = run.actor.tokens_of(first, 0)
    assert len(response) >= 8


def test_pipeline_keeps_its_rollouts_in_flight() -> None:
    seen: list[int] = []

    class Observed(PipelineSchedule):
        def num_to_admit(self, fleet: FleetView) -> int:
            admitted = super().num_to_admit(fleet)
            seen.append(fleet.num_in_flight + admitted)
            return admitted

    world = World(lengths=[3, 9, 4, 17], train_ticks=[1], grade_ticks=[0])
    Run(Observed(2, num_in_flight=6, queue_capacity=64), 2, world).finish()
    assert set(seen) == {6}


NUM_GROUPS = 5000
BATCH_SIZE = 16


def long_tailed(seed: int) -> list[int]:
    """Draw clipped log-normal lengths: mean 14, maximum 200 (tokens)."""
    draws = np.random.default_rng(seed).lognormal(mean=2.2, sigma=0.9, size=NUM_GROUPS * GROUP_SIZE)
    return [int(length) for length in np.clip(np.ceil(draws), 1, 200)]


WITH_QUEUES: dict[str, tuple[Schedule, int]] = {  # schedule, and ticks of an optimizer step
    "conventional": (ConventionalSchedule(BATCH_SIZE, steps_per_rl_step=4), 1),
    "pipeline": (PipelineSchedule(BATCH_SIZE, num_in_flight=64, queue_capacity=32), 2),
    "pipeline, training is slower": (PipelineSchedule(BATCH_SIZE, num_in_flight=64, queue_capacity=32), 6),
    "pipeline, max_lag": (PipelineSchedule(BATCH_SIZE, num_in_flight=64, queue_capacity=32, max_lag=4), 2),
    "april": (AprilSchedule(BATCH_SIZE, GROUP_SIZE, over_sampling=2), 1),
    "april, 1.25": (AprilSchedule(BATCH_SIZE, GROUP_SIZE, over_sampling=1.25, max_versions=3), 1),
    "bounded": (BoundedSchedule(BATCH_SIZE, max_lag=4), 2),
    "one_step_off": (BoundedSchedule(BATCH_SIZE, max_lag=1, updates="boundary"), 2),
}


def long_run(schedule: Schedule, train_ticks: int) -> Run:
    world = World(lengths=long_tailed(seed=0), train_ticks=[train_ticks], grade_ticks=[0, 0, 0, 2])
    return Run(schedule, BATCH_SIZE, world, num_steps=NUM_GROUPS * GROUP_SIZE // BATCH_SIZE).finish()


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_QUEUES)
def test_trained_lengths_are_generated_lengths(name: str) -> None:
    """Over 5,000 groups with a long tail, long rollouts are not starved and no group is lost."""
    run = long_run(*WITH_QUEUES[name])
    run.check_accounts()
    trained = [len(rollout.generated) for rollout in members(run.trained)]
    generated = list(run.lengths("generated").elements())
    assert len(trained) == NUM_GROUPS * GROUP_SIZE
    assert run.lengths("dropped").total() == 0
    assert ks_2samp(generated, trained).pvalue > 0.01
    assert ks_2samp(long_tailed(seed=1), trained).pvalue > 0.01
    # Every started group is trained in the end: the longest rollout is in flight during some 500 other groups.
    missing = set(range(NUM_GROUPS - 600)) - {group.group_id for group in run.trained}
    assert not missing


@pytest.mark.slow
def test_dropped_lengths_are_reported() -> None:
    schedule = PipelineSchedule(BATCH_SIZE, num_in_flight=64, queue_capacity=16, when_full="drop_oldest")
    run = long_run(schedule, train_ticks=8)
    run.check_accounts()
    trained, generated, dropped = (run.lengths(kind) for kind in ("trained", "generated", "dropped"))
    assert dropped.total() > trained.total() / 10
    assert dropped.total() % GROUP_SIZE == 0
    unreported = Counter(run.actor.state.generated_lengths)
    waiting = (generated + unreported) - trained - dropped - Counter(run.actor.state.dropped_lengths)
    done = [rollout for rollout in run.actor.open_rollouts() if rollout.is_done]
    assert waiting == Counter(len(rollout.generated) for rollout in done)
    bias = length_bias(generated, trained, dropped)
    distance = ks_2samp(list(generated.elements()), list(trained.elements())).statistic
    assert bias["ks"] == pytest.approx(distance)
    assert bias["dropped_rollouts"] == dropped.total()
    assert bias["mean_dropped"] == pytest.approx(sum(dropped.elements()) / dropped.total())


def test_starvation_of_long_rollouts_is_detected() -> None:
    """A pipeline that trains the shortest groups first shows a significant bias."""

    @dataclass(frozen=True, slots=True)
    class ShortestFirst(PipelineSchedule):
        def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
            if len(ready) < 32:
                return None
            ordered = sorted(ready, key=lambda group: sum(world.length_of(group.group_id * 2 + i) for i in (0, 1)))
            return take_batch(ordered, self.batch_size)

    world = World(lengths=long_tailed(seed=0), train_ticks=[1], grade_ticks=[0])
    run = Run(ShortestFirst(BATCH_SIZE, 64, queue_capacity=10**6), BATCH_SIZE, world, num_steps=60).finish()
    trained = [len(rollout.generated) for rollout in members(run.trained)]
    assert ks_2samp(long_tailed(seed=1), trained).pvalue < 0.01


def test_april_matches_a_trace_computed_by_hand() -> None:
    """Compare per iteration: trained pairs, their tokens, tokens from older iterations, most versions in a rollout."""
    pairs = [[3, 9], [5, 4], [12, 2], [1, 6], [8, 7], [2, 2], [15, 10]]
    world = World(lengths=[length for pair in pairs for length in pair], train_ticks=[1], grade_ticks=[0])
    run = Run(AprilSchedule(4, GROUP_SIZE, over_sampling=2), 4, world, num_steps=8)
    run.finish()
    seen = []
    for index, batch in enumerate(run.batches[:8]):
        versions = [rollout.generated.weight_versions for rollout in members(batch)]
        num_old = sum(int((each < index).sum()) for each in versions)
        most_versions = max(len(np.unique(each)) for each in versions)
        trained = sorted(group.group_id % len(pairs) for group in batch)
        seen.append((trained, sum(map(len, versions)), num_old, most_versions))
    assert seen == [
        ([1, 3], 16, 0, 1),
        ([0, 5], 16, 9, 2),
        ([2, 4], 29, 17, 3),
        ([0, 1], 21, 8, 2),
        ([3, 6], 32, 20, 3),
        ([2, 4], 29, 25, 3),
        ([1, 5], 13, 4, 1),
        ([0, 3], 19, 8, 2),
    ]
