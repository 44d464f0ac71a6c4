"""Simulator against exact formulas, and invariants of every simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.errors import ScenarioError
from midflight.protocols import Schedule
from midflight.schedules.april import AprilSchedule
from midflight.schedules.bounded import BoundedSchedule
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule
from midflight.sim.costs import AffineCost, RateTable
from midflight.sim.lengths import CycledLengths, lognormal, uniform
from midflight.sim.simulator.engines import SimEngine, SimRollout, StepTimes
from midflight.sim.simulator.failures import Failure, Failures
from midflight.sim.simulator.simulation import Delays, SimulatedRun, simulate
from soak import SOAK

UNBOUNDED = 10**9  # queue capacity, rollouts
LENGTHS = lognormal(40, 0.8, 300)


class ListedFailures(Failures):
    """Failures from a list of (engine, start, end)."""

    def __init__(self, failures: Sequence[tuple[int, float, float]]) -> None:
        super().__init__()
        self._failures = failures

    def next(self, engine: int, after: float) -> Failure | None:
        own = [Failure(start, end) for index, start, end in self._failures if index == engine and start >= after]
        return min(own, default=None)


def pipeline_run(**changes: object) -> SimulatedRun:
    run = SimulatedRun(
        schedule=PipelineSchedule(16, 24, UNBOUNDED),
        lengths=uniform(64),
        step_cost=AffineCost(1.0, 0.01),
        num_engines=3,
        batch_size=16,
        num_steps=150,
        train_time_per_token=0.005,
    )
    return replace(run, **changes)  # type: ignore[arg-type]


def test_single_sequence_takes_the_sum_of_its_steps() -> None:
    """Ten steps hold 0, 1, ... 9 tokens."""
    alone = ConventionalSchedule(batch_size=1)
    run = pipeline_run(
        schedule=alone, batch_size=1, lengths=CycledLengths([10]), step_cost=AffineCost(2.0, 0.5, 0.1), num_engines=1
    )
    batch = simulate(replace(run, num_steps=1)).batches[0]
    assert batch.handed_over.time == pytest.approx(10 * 2.5 + 0.1 * 45)
    assert batch.end - batch.start == pytest.approx(10 * 0.005)


def test_draining_batch_speeds_up() -> None:
    """Sequences of 2 and 5 tokens: two steps with both hold 0 and 2 tokens, three with one hold 2, 3, 4."""
    run = pipeline_run(
        schedule=ConventionalSchedule(batch_size=2),
        batch_size=2,
        lengths=CycledLengths([2, 5]),
        step_cost=AffineCost(1.0, 1.0, 0.25),
        num_engines=1,
        num_steps=1,
    )
    steps = [3.0, 3.0 + 0.5, 2.0 + 0.5, 2.0 + 0.75, 2.0 + 1.0]
    assert simulate(run).batches[0].handed_over.time == pytest.approx(sum(steps))


def test_update_before_first_token_leaves_one_version() -> None:
    engine, rollout = SimEngine(0, StepTimes(AffineCost(1.0))), SimRollout(0, 0, length=3)
    engine.add(rollout, 0.0)
    engine.adopt(0.0, pause=0.0)
    assert engine.take_ended() == [rollout]
    assert (rollout.num_versions, rollout.last_update, rollout.segments[0].first_update) == (1, 1, 1)


def test_simulation_is_reproducible() -> None:
    run = pipeline_run(failures=Failures(300.0, 50.0, seed=3))
    assert simulate(run).figures() == simulate(replace(run, failures=Failures(300.0, 50.0, seed=3))).figures()
    assert simulate(run).figures() != simulate(replace(run, seed=1)).figures()


@pytest.mark.parametrize("delay", ["transfer", "preprocess"])
def test_delays_add_to_mean_lag(delay: str) -> None:
    run = pipeline_run(num_steps=600)
    plain = simulate(run).after(100)
    period = plain.elapsed / 500
    late = simulate(replace(run, delays=Delays(**{delay: 2.5 * period}))).after(100)
    assert late.rate == pytest.approx(plain.rate, rel=0.01)
    assert late.mean_lags.mean() - plain.mean_lags.mean() == pytest.approx(2.5, abs=0.1)


@pytest.mark.parametrize("pause", ["update_pause", "handover_pause"])
def test_pauses_slow_generation(pause: str) -> None:
    run = pipeline_run(num_steps=600)
    plain = simulate(run).after(100)
    period = plain.elapsed / 500
    paused = simulate(replace(run, delays=Delays(**{pause: 0.25 * period}))).after(100)
    assert paused.rate == pytest.approx(plain.rate / 1.25, rel=0.02)


def test_engine_failure_loses_time_but_no_rollout() -> None:
    run = pipeline_run(failures=ListedFailures([(1, 100.0, 400.0), (2, 250.0, 260.0)]))
    result = simulate(run)
    check_accounts(run, result.batches)
    carried = [batch.carried_tokens for batch in result.batches]
    assert sum(carried) > 0
    assert result.batches[-1].end > simulate(pipeline_run()).batches[-1].end


def test_run_survives_failure_of_all_engines() -> None:
    run = pipeline_run(failures=ListedFailures([(engine, 100.0 + engine, 500.0) for engine in range(3)]))
    result = simulate(run)
    check_accounts(run, result.batches)
    times = [batch.handed_over.time for batch in result.batches]
    assert not [time for time in times if 103 < time < 500]


def test_filtered_groups_are_replaced_and_counted() -> None:
    run = pipeline_run(filter_rate=0.3, group_size=4, num_steps=400)
    result = simulate(run)
    check_accounts(run, result.batches)
    num_trained = 400 * 16 // 4
    num_filtered = result.batches[-1].handed_over.num_filtered_groups
    assert num_filtered / (num_filtered + num_trained) == pytest.approx(0.3, abs=0.03)


def test_groups_wait_for_their_slowest_member() -> None:
    """A group of four waits for its longest: the rate is the same, but tokens are older."""
    alone, grouped = (simulate(pipeline_run(group_size=size, num_steps=500)).after(100) for size in (1, 4))
    assert grouped.rate == pytest.approx(alone.rate, rel=0.02)
    assert grouped.last_lag > 2 * alone.last_lag


def test_schedule_without_a_batch_is_an_error() -> None:
    with pytest.raises(ScenarioError, match=r"schedule: stuck at optimizer step 0, with 15 finished rollouts"):
        simulate(pipeline_run(schedule=PipelineSchedule(16, 5, queue_capacity=0)))


def test_load_beyond_the_table_is_an_error() -> None:
    with pytest.raises(ScenarioError, match=r"num_in_flight = 17 is beyond the table"):
        simulate(pipeline_run(step_cost=RateTable((1, 16), (1.0, 8.0))))


delays = st.builds(
    Delays,
    transfer=st.sampled_from([0.0, 3.0, 50.0]),
    preprocess=st.sampled_from([0.0, 7.0]),
    update_pause=st.sampled_from([0.0, 0.5]),
    handover_pause=st.sampled_from([0.0, 0.25]),
)
schedules = st.one_of(
    st.builds(PipelineSchedule, st.just(16), st.integers(4, 40), st.just(400), st.integers(0, 6)),
    st.builds(BoundedSchedule, st.just(16), st.integers(0, 5), st.sampled_from(["in_flight", "boundary"])),
    st.builds(ConventionalSchedule, st.just(16), st.integers(1, 5)),
    st.builds(AprilSchedule, st.just(16), st.just(4), st.sampled_from([1.0, 1.5, 3.0]), st.sampled_from([None, 2])),
)


@pytest.mark.slow
@settings(max_examples=60 * SOAK, deadline=None)
@given(schedules, delays, st.integers(1, 4), st.sampled_from([None, 200.0]), st.sampled_from([0.0, 0.3]))
def test_lag_bounds_and_accounts_always_hold(
    schedule: Schedule, delays: Delays, num_engines: int, mean_time_between: float | None, filter_rate: float
) -> None:
    run = pipeline_run(
        schedule=schedule,
        lengths=LENGTHS,
        group_size=4,
        num_engines=num_engines,
        num_steps=40,
        train_time_per_token=0.02,
        delays=delays,
        filter_rate=filter_rate,
    )
    if mean_time_between is not None:
        run = replace(run, failures=Failures(mean_time_between, 30.0, seed=0))
    batches = simulate(run).batches
    check_accounts(run, batches)
    bound = getattr(schedule, "max_lag", None)
    if isinstance(schedule, ConventionalSchedule):
        bound = schedule.steps_per_rl_step - 1
    if bound is not None:
        assert max(batch.max_lag for batch in batches) <= bound


def check_accounts(run: SimulatedRun, batches: list) -> None:  # type: ignore[type-arg]
    """Check that each group is whole in at most one batch, and that each rollout has all of its tokens."""
    groups = Counter(group for batch in batches for group in batch.group_ids.tolist())
    assert set(groups.values()) == {run.group_size}
    rollouts = [rollout for batch in batches for rollout in batch.rollout_ids.tolist()]
    assert len(rollouts) == len(set(rollouts)) == run.batch_size * run.num_steps
    for batch in batches:
        assert sum(batch.lag_histogram.values()) == batch.num_tokens
        assert (batch.first_lags >= batch.last_lags).all(), "a version went down along a sequence"
        assert batch.max_lag == batch.first_lags.max()
        assert (batch.num_versions <= batch.first_lags - batch.last_lags + 1).all()
    assert np.diff([batch.start for batch in batches]).min() >= 0
