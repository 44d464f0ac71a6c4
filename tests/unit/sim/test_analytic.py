"""Formulas with every term in use: delays, pauses, fixed costs, attention over response tokens in flight."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from midflight.errors import ScenarioError
from midflight.sim.costs import AffineCost
from midflight.sim.formulas.analytic import conventional, one_step_off, pipeline
from midflight.sim.formulas.steady_state import Queue
from midflight.sim.lengths import constant, two_point
from midflight.sim.workload import Workload

# A decode step takes 2 + 0.5 h; a response has 10 tokens.
FLAT = Workload(
    num_gpus=4,
    batch_size=8,
    lengths=constant(10),
    step_cost=AffineCost(2.0, 0.5),
    train_time_per_token=0.5,
    train_time_per_step=1.0,
)


def test_conventional_period_is_the_sum_of_its_parts() -> None:
    delayed = replace(FLAT, transfer=3.0, preprocess=5.0, update_pause=0.25, handover_pause=0.5)
    # 2 * 8 rollouts on 4 engines: 10 steps of 2 + 0.5 * 4; a batch is trained on in 1 + 0.5 * 80 / 4.
    turns = conventional(delayed, 2)
    assert turns.generation_rate == pytest.approx(160 / 40)
    assert turns.training_rate == pytest.approx(80 / 11)
    assert turns.period == pytest.approx((40 + 5 + 2 * 11 + 3 + 0.25) / 2)
    assert turns.rate == pytest.approx(80 / turns.period)
    assert turns.trainer_share == pytest.approx(11 / turns.period)


def test_tokens_in_flight_make_steps_longer() -> None:
    held = replace(FLAT, step_cost=AffineCost(2.0, 0.5, per_token=0.01))
    # As a whole batch, 4 on each engine hold 4 * (0 + 1 + ... + 9) = 180 tokens over their ten steps.
    assert 160 / conventional(held, 2).generation_rate == pytest.approx(40 + 1.8)
    # In the steady state, a rollout holds 4.5 tokens on average.
    assert 80 / pipeline(held, 4, 2).generation_rate == pytest.approx(10 * (2 + 2 + 0.01 * 4 * 4.5))


def test_long_responses_stay_in_flight_longer() -> None:
    lengths = two_point(2, 10, 0.5)
    held = replace(FLAT, lengths=lengths, step_cost=AffineCost(2.0, 0.5, per_token=0.01))
    # Of 12 tokens, 2 are of a short response and hold 0.5 on average, 10 of a long one and hold 4.5.
    assert held.steady_step_times(4) == pytest.approx(4 + 0.01 * 4 * (2 * 0.5 + 10 * 4.5) / 12)
    assert held.mean_age == pytest.approx(((2 * 1 + 10 * 5) / 12) / 10)


def test_pauses_slow_generation_but_keep_lag() -> None:
    # Two engines with four in flight: 80 tokens in 40; on two GPUs a step takes 1 + 20.
    free, paused = pipeline(FLAT, 4, 2), pipeline(replace(FLAT, update_pause=6.0, handover_pause=4.0), 4, 2)
    assert (free.period, paused.period) == pytest.approx((40, 50))
    assert free.in_flight_steps == pytest.approx(paused.in_flight_steps) == pytest.approx(1)
    assert (free.trainer_share, paused.trainer_share) == pytest.approx((21 / 40, 21 / 50))
    assert paused.max_lag == 2


def test_delays_add_to_lag_but_not_to_period() -> None:
    delayed = pipeline(replace(FLAT, transfer=8.0, preprocess=12.0), 4, 2)
    assert delayed.period == pytest.approx(40)
    assert delayed.lag_bound == pytest.approx(1 + 21 / 40 + 20 / 40)
    assert delayed.mean_lag == pytest.approx(0.5 + 21 / 40 + 20 / 40)


def test_engines_of_several_gpus() -> None:
    wide = replace(FLAT, gpus_per_engine=2)
    assert conventional(wide, 1).num_engines == 2
    assert pipeline(wide, 4, 1).num_training_gpus == 2
    with pytest.raises(ScenarioError, match=r"cluster.num_engines = 2: with 4 GPUs and 2 per engine, use 1"):
        pipeline(wide, 4, 2)
    with pytest.raises(ScenarioError, match=r"cluster.num_gpus = 4 is not a multiple of gpus_per_engine = 3"):
        conventional(replace(FLAT, gpus_per_engine=3), 1)


def test_blocked_engines_match_the_training_rate() -> None:
    slow = replace(FLAT, train_time_per_token=2.0)  # 1 + 80 on two GPUs
    split = pipeline(slow, 8, 2, Queue(8))
    # a of the 16 slots: 80 tokens in 81, so that 2 (a / 2) / (2 + 0.5 a / 2) = 80 / 81.
    active = 2 * 80 / (81 - 20)
    assert split.period == pytest.approx(81)
    assert split.in_flight_steps == pytest.approx(active * 10 / 80)
    assert split.lag_bound == pytest.approx(active / 8 + (16 - active) / 8 + 8 / 8 + 1)
    assert split.mean_lag == pytest.approx(active / 8 / 2 + (16 - active) / 8 + 8 / 8 + 0.5)
    delayed = pipeline(replace(slow, transfer=8.0, preprocess=5.0), 8, 2, Queue(8))
    assert delayed == split, "delays pass while a batch waits"


def test_one_step_off_period_is_the_longest_of_three() -> None:
    # Two engines with four each: 40. Training on two GPUs: 21. In turns: half the sum of both and the delays.
    assert one_step_off(FLAT, 1, 2).period == pytest.approx(40)
    assert one_step_off(replace(FLAT, train_time_per_token=2.0), 1, 2).period == pytest.approx(81)
    assert one_step_off(replace(FLAT, transfer=20.0, preprocess=9.0), 1, 2).period == pytest.approx((40 + 21 + 29) / 2)
    assert (one_step_off(FLAT, 3, 2).max_lag, one_step_off(FLAT, 3, 2).mean_lag) == (5, 4)


def test_training_without_cost() -> None:
    free = replace(FLAT, train_time_per_token=0.0, train_time_per_step=0.0)
    split, turns = pipeline(free, 4, 2), conventional(free, 1)
    assert split.training_rate == turns.training_rate == math.inf
    assert (split.trainer_share, turns.trainer_share) == (0, 0)
    assert split.max_lag == 1


def test_split_without_training_gpu_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"cluster.num_engines = 4: .* use 1 to 3"):
        pipeline(FLAT, 4, 4)
