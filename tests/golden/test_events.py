"""Simulator against other simulators of the same rules, on the case study's cluster at half and full size.

Lengths are uniform up to 1024. Of 1000 optimizer steps, the first 400 fill the queues and are left out.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from golden.numbers import EXPECTED, paper_workload
from midflight.protocols import Schedule
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule
from midflight.sim.costs import PAPER_STEP_COST, PAPER_TRAIN_TIME_PER_TOKEN
from midflight.sim.formulas.analytic import pipeline
from midflight.sim.formulas.steady_state import Queue
from midflight.sim.lengths import uniform
from midflight.sim.simulator.result import SimulationResult
from midflight.sim.simulator.simulation import SimulatedRun, simulate

UNBOUNDED = 10**9  # queue capacity, rollouts
POSITIONS = (0, 4, 8, 12, 16)  # indices of 20: 0.025, 0.225, ... of the longest response

CASES: dict[str, tuple[int, int, Schedule]] = {
    "D1_N128_H192_I40": (128, 40, PipelineSchedule(128, 192, UNBOUNDED)),
    "D3_block_I50_q128": (128, 50, PipelineSchedule(128, 192, 128)),
    "D4_drop_I50_q256": (128, 50, PipelineSchedule(128, 192, 256, when_full="drop_oldest")),
    "D5a_N64_H192_I20": (64, 20, PipelineSchedule(128, 192, UNBOUNDED)),
}


@cache
def full_run(name: str) -> SimulationResult:
    num_gpus, num_engines, schedule = CASES[name]
    run = SimulatedRun(
        schedule=schedule,
        lengths=uniform(1024),
        step_cost=PAPER_STEP_COST,
        num_engines=num_engines,
        batch_size=128,
        num_steps=1000,
        train_time_per_token=PAPER_TRAIN_TIME_PER_TOKEN / (num_gpus - num_engines),
    )
    return simulate(run)


def mean_of(name: str, figure: str) -> float:
    return float(EXPECTED[name]["sim"][figure]["mean"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rate", "mean_lag", "median_max_lag"),
    [
        ("D1_N128_H192_I40", 0.01, 0.02, 1.5),
        ("D3_block_I50_q128", 0.005, 0.02, 2.0),
        ("D4_drop_I50_q256", 0.01, 0.03, 2.0),
        ("D5a_N64_H192_I20", 0.01, 0.02, 1.5),
    ],
)
def test_speed_and_lag(name: str, rate: float, mean_lag: float, median_max_lag: float) -> None:
    result = full_run(name).after(400)
    assert result.rate == pytest.approx(mean_of(name, "r"), rel=rate)
    assert result.mean_lags.mean() == pytest.approx(mean_of(name, "mean_lag"), rel=mean_lag)
    assert np.median(result.max_lags) == pytest.approx(mean_of(name, "max_lag_p50"), abs=median_max_lag)
    assert result.last_lag == pytest.approx(mean_of(name, "last_lag"), abs=0.2)
    profile = result.lag_by_position[list(POSITIONS)]
    np.testing.assert_allclose(profile, EXPECTED[name]["sim"]["profile"], atol=1.0)
    halves = np.array_split(result.mean_lags, 2)
    assert halves[1].mean() / halves[0].mean() == pytest.approx(1.0, abs=0.02), "lag drifts"


@pytest.mark.slow
def test_max_lag_stays_close_to_the_formula() -> None:
    result = full_run("D1_N128_H192_I40").after(400)
    assert result.max_lags.max() <= 125
    assert result.last_lag == pytest.approx(mean_of("D1_N128_H192_I40", "last_lag"), abs=0.02)


@pytest.mark.slow
def test_twice_the_gpus_double_rate_and_lag() -> None:
    full, half = full_run("D1_N128_H192_I40").after(400), full_run("D5a_N64_H192_I20").after(400)
    assert full.rate / half.rate == pytest.approx(2.00, rel=0.01)
    assert full.mean_lags.mean() / half.mean_lags.mean() == pytest.approx(1.96, rel=0.02)
    assert np.median(full.max_lags) / np.median(half.max_lags) == pytest.approx(1.97, rel=0.03)


@pytest.mark.slow
def test_full_queue_drops_the_excess() -> None:
    result = full_run("D4_drop_I50_q256")
    num_dropped = result.batches[-1].handed_over.num_dropped_groups
    dropped = num_dropped / (num_dropped + sum(len(batch.lengths) for batch in result.batches))
    assert dropped == pytest.approx(mean_of("D4_drop_I50_q256", "dropped_frac"), abs=0.015)
    fluid = pipeline(paper_workload(lengths=uniform(1024)), 192, 50, Queue(256, "drop_oldest"))
    assert result.after(400).rate == pytest.approx(fluid.rate, rel=0.005)


@pytest.mark.slow
def test_conventional_rl() -> None:
    num_steps = 133
    expected = EXPECTED["D6_conv_G133"]["sim"]
    run = SimulatedRun(
        schedule=ConventionalSchedule(128, num_steps),
        lengths=uniform(1024),
        step_cost=PAPER_STEP_COST,
        num_engines=128,
        batch_size=128,
        num_steps=6 * num_steps,
        train_time_per_token=PAPER_TRAIN_TIME_PER_TOKEN / 128,
    )
    result = simulate(run)
    assert result.rate == pytest.approx(expected["r"]["mean"], rel=0.01)
    assert [batch.lag_histogram for batch in result.batches] == [
        {index % num_steps: batch.num_tokens} for index, batch in enumerate(result.batches)
    ]
    assert result.mean_lags.mean() == expected["mean_lag"]["mean"]
    assert result.max_lags.max() == expected["max_lag"]["mean"]
    generating = 1.0 - result.trainer_share
    assert generating == pytest.approx(expected["gen_frac"]["mean"], rel=0.01)
    trained = sum(batch.num_tokens for batch in result.batches)
    assert trained / (generating * result.elapsed) == pytest.approx(expected["gen"]["mean"], rel=0.01)
