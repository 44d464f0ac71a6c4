"""What every schedule promises, under random lengths, trainer delays and failures, on a virtual clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.actor.actor import Actor, ActorConfig
from midflight.protocols import Schedule
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule
from midflight.testing.fakes import CountingEnvironment, DigitTokenizer, ScriptedGenerator
from midflight.types import RolloutGroup, SamplingParams

GROUP_SIZE = 2


@dataclass
class World:
    """The lengths of rollouts, the ticks of optimizer steps, and which groups' grading fails."""

    lengths: list[int]
    train_ticks: list[int]
    failing: set[int]
    num_steps: int = 12


worlds = st.builds(
    World,
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    train_ticks=st.lists(st.integers(1, 25), min_size=1, max_size=8),
    failing=st.sets(st.integers(0, 30), max_size=6),
)


class FailingEnvironment(CountingEnvironment):
    def __init__(self, failing: set[int]) -> None:
        def reward_of(index: int) -> float:
            if index in failing:
                raise RuntimeError("the verifier broke")
            return 1.0

        super().__init__(reward_of)


def simulate(schedule: Schedule, batch_size: int, world: World) -> tuple[list[list[RolloutGroup]], Actor]:
    """The rollout loop and a trainer in one tick loop: a decode step a tick, an optimizer step some ticks."""
    generator = ScriptedGenerator(lambda rollout: world.lengths[rollout % len(world.lengths)])
    actor = Actor(
        ActorConfig(batch_size, GROUP_SIZE, SamplingParams(max_tokens=100), seed=0),
        generator,
        schedule,
        FailingEnvironment(world.failing),
        DigitTokenizer(),
    )
    batches: list[list[RolloutGroup]] = []
    version, done_at = 0, 0
    for tick in range(20_000):
        if version == world.num_steps:
            return batches[:version], actor
        if schedule.should_update_weights(actor.fleet(version)):
            generator.update_weights(version, {})
        actor.admit(actor.fleet(version))
        actor.step()
        while groups := actor.choose_batch(actor.fleet(version)):
            if len(batches) == version:  # the trainer was idle
                done_at = tick + world.train_ticks[version % len(world.train_ticks)]
            batches.append(groups)
        if len(batches) > version and tick >= done_at:
            version += 1
            done_at = tick + world.train_ticks[version % len(world.train_ticks)]
    pytest.fail(f"stuck at version {version} after {len(batches)} batches")


def lags(batches: list[list[RolloutGroup]]) -> list[int]:
    return [
        index - int(version)
        for index, groups in enumerate(batches)
        for group in groups
        for rollout in group.rollouts
        for version in rollout.generated.weight_versions
    ]


def check_conservation(batches: list[list[RolloutGroup]], batch_size: int, actor: Actor, failing: set[int]) -> None:
    trained = Counter(group.group_id for groups in batches for group in groups)
    assert set(trained.values()) == {1}, "a group was trained twice"
    assert not trained.keys() & failing
    assert all(sum(len(group.rollouts) for group in groups) == batch_size for groups in batches)
    state = actor.state
    batched = state.num_batches * batch_size // GROUP_SIZE
    assert state.next_group_id == batched + state.num_failed_groups + len(state.open_group_ids)
    for groups in batches:
        for group in groups:
            for rollout in group.rollouts:
                assert (np.diff(rollout.generated.weight_versions) >= 0).all(), "a version went down along a sequence"


@given(worlds, st.integers(1, 4), st.integers(1, 3))
def test_conventional_keeps_its_bound(world: World, steps_per_rl_step: int, groups_per_batch: int) -> None:
    batch_size = groups_per_batch * GROUP_SIZE
    schedule = ConventionalSchedule(batch_size, steps_per_rl_step)
    batches, actor = simulate(schedule, batch_size, world)
    assert max(lags(batches)) <= steps_per_rl_step - 1
    check_conservation(batches, batch_size, actor, world.failing)


@given(worlds, st.integers(0, 5), st.integers(1, 3), st.integers(1, 9))
def test_pipeline_keeps_a_hard_bound(world: World, max_lag: int, groups_per_batch: int, num_in_flight: int) -> None:
    batch_size = groups_per_batch * GROUP_SIZE
    schedule = PipelineSchedule(batch_size, num_in_flight, max_waiting=4 * batch_size, max_lag=max_lag)
    batches, actor = simulate(schedule, batch_size, world)
    assert max(lags(batches)) <= max_lag
    check_conservation(batches, batch_size, actor, world.failing)


@given(worlds, st.integers(1, 3), st.integers(1, 9))
def test_pipeline_without_a_bound_never_holds_more_than_it_may(
    world: World, groups_per_batch: int, num_in_flight: int
) -> None:
    batch_size = groups_per_batch * GROUP_SIZE
    schedule = PipelineSchedule(batch_size, num_in_flight, max_waiting=2 * batch_size)
    batches, actor = simulate(schedule, batch_size, world)
    check_conservation(batches, batch_size, actor, world.failing)
    fleet = actor.fleet(world.num_steps)
    waiting = fleet.num_finished - world.num_steps * batch_size
    assert fleet.num_in_flight <= num_in_flight
    # Rollouts in flight when the queue fills up still finish; a group adds its last member's siblings at once.
    assert waiting <= 2 * batch_size + num_in_flight + GROUP_SIZE


def test_a_cap_on_admissions_alone_would_not_bound_the_lag() -> None:
    """Why batches are taken in start order under max_lag: the same admissions, batches in finish order, break it."""

    @dataclass(frozen=True, slots=True)
    class FinishOrder(PipelineSchedule):
        def choose_batch(self, fleet, ready):  # type: ignore[no-untyped-def]
            from midflight.schedules.batches import take_batch

            return take_batch(ready, self.batch_size)

    world = World(lengths=[40, 1, 1, 1, 1, 1, 1, 1, 1, 1], train_ticks=[1], failing=set(), num_steps=30)
    bounded, _ = simulate(PipelineSchedule(2, 8, 64, max_lag=2), 2, world)
    assert max(lags(bounded)) <= 2
    broken, _ = simulate(FinishOrder(2, 8, 64, max_lag=2), 2, world)
    assert max(lags(broken)) > 2


def test_pipeline_keeps_its_rollouts_in_flight() -> None:
    world = World(lengths=[3, 9, 4, 17], train_ticks=[1], failing=set())
    schedule = PipelineSchedule(2, num_in_flight=6, max_waiting=64)
    seen: list[int] = []

    class Watched(PipelineSchedule):
        def num_to_admit(self, fleet):  # type: ignore[no-untyped-def]
            admitted = super().num_to_admit(fleet)
            seen.append(fleet.num_in_flight + admitted)
            return admitted

    simulate(Watched(schedule.batch_size, schedule.num_in_flight, schedule.max_waiting), 2, world)
    assert set(seen) == {6}
