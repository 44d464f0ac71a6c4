"""Simulator compared with the real actor and rollout loop, tick by tick: same batches, same version of every token."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.protocols import Schedule
from midflight.schedules.april import AprilSchedule
from midflight.schedules.bounded import BoundedSchedule
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule
from midflight.sim.costs import AffineCost
from midflight.sim.lengths import CycledLengths
from midflight.sim.simulator.engines import SimEngine, SimRollout
from midflight.sim.simulator.simulation import SimulatedRun, simulate
from property.test_schedules import GROUP_SIZE, Run, World, members

NUM_STEPS = 12
BATCH_SIZE = 4

# Without drop_oldest: the real loop notices an idle trainer one tick later.
SCHEDULES: dict[str, Schedule] = {
    "conventional": ConventionalSchedule(BATCH_SIZE),
    "conventional, G = 3": ConventionalSchedule(BATCH_SIZE, 3, num_in_flight=5),
    "pipeline": PipelineSchedule(BATCH_SIZE, num_in_flight=6, queue_capacity=8),
    "pipeline, max_lag": PipelineSchedule(BATCH_SIZE, num_in_flight=6, queue_capacity=12, max_lag=2),
    "april": AprilSchedule(BATCH_SIZE, GROUP_SIZE, over_sampling=2.0),
    "april, max_versions": AprilSchedule(BATCH_SIZE, GROUP_SIZE, over_sampling=2.5, max_versions=2),
    "april, few in flight": AprilSchedule(BATCH_SIZE, GROUP_SIZE, over_sampling=2.0, num_in_flight=5),
    "bounded": BoundedSchedule(BATCH_SIZE, max_lag=3),
    "one_step_off": BoundedSchedule(BATCH_SIZE, max_lag=1, updates="boundary"),
}


class Ticking(Run):
    """Run whose trainer starts the next batch in the tick that ends the last one, as the simulated trainer does."""

    _ends_at = 0

    def iteration(self) -> None:
        self.loop.iteration(self.receiver.version)
        self.tick += 1
        if self._ends_at and self.tick >= self._ends_at:
            self.receiver.version += 1
            self._ends_at = 0
        if not self._ends_at and len(self.batches) > self.receiver.version:
            self._ends_at = self.tick + self.world.train_ticks[0]


@pytest.fixture(autouse=True, scope="module")
def same_order() -> Iterator[None]:
    """Sort rollouts that end in one tick by id, as the real actor does; the simulator sorts them by slot."""
    take_ended = SimEngine.take_ended

    def in_order(engine: SimEngine) -> list[SimRollout]:
        return sorted(take_ended(engine), key=operator.attrgetter("rollout_id"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimEngine, "take_ended", in_order)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), train_ticks=st.integers(1, 25))
def test_simulated_batches_match_the_real_loop(name: str, lengths: list[int], train_ticks: int) -> None:
    schedule = SCHEDULES[name]
    world = World(lengths, [train_ticks], grade_ticks=[0])
    real = Ticking(schedule, BATCH_SIZE, world, num_steps=NUM_STEPS).finish()
    simulated = simulate(
        SimulatedRun(
            schedule=schedule,
            lengths=CycledLengths(lengths),
            step_cost=AffineCost(1.0),
            num_engines=1,
            batch_size=BATCH_SIZE,
            group_size=GROUP_SIZE,
            num_steps=NUM_STEPS,
            train_time_per_token=0.0,
            train_time_per_step=train_ticks,
        )
    )
    assert len(simulated.batches) == NUM_STEPS
    for batch, groups in zip(simulated.batches, real.batches, strict=False):
        rollouts = members(groups)
        assert batch.rollout_ids.tolist() == [rollout.rollout_id for rollout in rollouts]
        lags = [batch.index - rollout.generated.weight_versions for rollout in rollouts]
        assert batch.first_lags.tolist() == [int(lag[0]) for lag in lags]
        assert batch.last_lags.tolist() == [int(lag[-1]) for lag in lags]
        assert batch.lag_histogram == Counter(int(each) for lag in lags for each in lag)
        assert batch.carried_tokens == sum(rollout.num_carried for rollout in rollouts)
        assert batch.num_versions.tolist() == [len(set(lag.tolist())) for lag in lags]
