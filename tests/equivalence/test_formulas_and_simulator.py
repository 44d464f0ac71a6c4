"""Formulas compared with the independent simulator: delays, pauses, long tails, full queues."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from midflight.protocols import Schedule
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule
from midflight.sim.costs import PAPER_STEP_COST, AffineCost
from midflight.sim.formulas.analytic import conventional, pipeline
from midflight.sim.formulas.steady_state import Queue
from midflight.sim.lengths import lognormal, uniform
from midflight.sim.simulator.result import SimulationResult
from midflight.sim.simulator.simulation import Delays, SimulatedRun, simulate
from midflight.sim.workload import Workload

BATCH_SIZE = 64
IN_FLIGHT = 192
BASE = Workload(16, BATCH_SIZE, uniform(256), PAPER_STEP_COST, 4.919)
PERIOD = pipeline(BASE, IN_FLIGHT, 5).period


def simulated(workload: Workload, schedule: Schedule, num_engines: int, num_training_gpus: int) -> SimulationResult:
    run = SimulatedRun(
        schedule,
        workload.lengths,
        workload.step_cost,
        num_engines,
        workload.batch_size,
        num_steps=400,
        train_time_per_token=workload.train_time_per_token / num_training_gpus,
        train_time_per_step=workload.train_time_per_step,
        delays=Delays(workload.transfer, workload.preprocess, workload.update_pause, workload.handover_pause),
    )
    return simulate(run).after(100)


CASES = {
    "nothing": BASE,
    "transfer": replace(BASE, transfer=0.5 * PERIOD),
    "preprocess": replace(BASE, preprocess=0.5 * PERIOD),
    "update pause": replace(BASE, update_pause=0.1 * PERIOD),
    "handover pause": replace(BASE, handover_pause=0.1 * PERIOD),
    "time per step": replace(BASE, train_time_per_step=0.05 * PERIOD),
    "attention": replace(BASE, step_cost=AffineCost(400, 0.5, 0.0004)),
    "long tail": replace(BASE, lengths=lognormal(60, 0.8, 256)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_pipeline_limited_by_generation(name: str) -> None:
    workload = CASES[name]
    expected = pipeline(workload, IN_FLIGHT, 5)
    result = simulated(workload, PipelineSchedule(BATCH_SIZE, IN_FLIGHT, BATCH_SIZE), 5, 11)
    assert expected.trainer_share < 0.95
    assert result.rate == pytest.approx(expected.rate, rel=0.01)
    assert result.trainer_share == pytest.approx(expected.trainer_share, abs=0.02)
    assert result.mean_lags.mean() == pytest.approx(expected.mean_lag, rel=0.025)
    assert np.median(result.max_lags) == pytest.approx(expected.lag_bound, abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "transfer", "preprocess", "update pause", "handover pause"])
@pytest.mark.parametrize(
    ("queue_capacity", "when_full"), [(BATCH_SIZE, "block"), (4 * BATCH_SIZE, "block"), (4 * BATCH_SIZE, "drop_oldest")]
)
def test_pipeline_limited_by_training(
    name: str, queue_capacity: int, when_full: Literal["block", "drop_oldest"]
) -> None:
    workload = CASES[name]
    expected = pipeline(workload, IN_FLIGHT, 7, Queue(queue_capacity, when_full))
    schedule = PipelineSchedule(BATCH_SIZE, IN_FLIGHT, queue_capacity, None, when_full)
    result = simulated(workload, schedule, 7, 9)
    assert result.rate == pytest.approx(expected.rate, rel=0.01)
    assert result.mean_lags.mean() == pytest.approx(expected.mean_lag, rel=0.025)
    assert expected.lag_bound - 3.5 <= np.median(result.max_lags) <= expected.lag_bound + 1
    num_dropped = result.figures()["dropped/queue_full_groups"]
    assert isinstance(num_dropped, int)
    num_trained = len(result.measured) * BATCH_SIZE
    assert num_dropped / (num_dropped + num_trained) == pytest.approx(expected.dropped_share, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "transfer", "preprocess", "time per step", "attention"])
def test_conventional_rl(name: str) -> None:
    workload = CASES[name]
    steps = 12
    expected = conventional(workload, steps)
    result = simulated(workload, ConventionalSchedule(BATCH_SIZE, steps), 16, 16)
    assert result.rate == pytest.approx(expected.rate, rel=0.01)
    assert result.trainer_share == pytest.approx(expected.trainer_share, abs=0.02)
    assert (result.max_lags.max(), result.mean_lags.mean()) == (
        expected.max_lag,
        pytest.approx(expected.mean_lag, rel=0.01),
    )
