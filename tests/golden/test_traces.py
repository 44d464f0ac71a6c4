"""Runs worked out by hand, tick by tick; a tick is one decode step and one unit of time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from golden.numbers import EXPECTED
from midflight.schedules.april import AprilSchedule
from midflight.schedules.pipeline import PipelineSchedule
from midflight.sim.costs import AffineCost
from midflight.sim.lengths import CycledLengths
from midflight.sim.simulator.result import Snapshot, TrainedBatch
from midflight.sim.simulator.simulation import SimulatedRun, simulate

TICK = AffineCost(1.0)
UNBOUNDED = 10**9  # queue capacity, rollouts


@pytest.mark.parametrize(
    ("name", "num_in_flight", "batch_size", "train_ticks", "lengths"),
    [("T1_trace_H4_B4_D5", 4, 4, 5, [2, 7, 3, 5, 4, 6, 1, 8]), ("T2_trace_H6_B3_D2", 6, 3, 2, [5, 1, 9, 4])],
)
def test_pipeline_trace(name: str, num_in_flight: int, batch_size: int, train_ticks: int, lengths: list[int]) -> None:
    expected = EXPECTED[name]
    run = SimulatedRun(
        schedule=PipelineSchedule(batch_size, num_in_flight, UNBOUNDED),
        lengths=CycledLengths(lengths),
        step_cost=TICK,
        num_engines=1,
        batch_size=batch_size,
        num_steps=len(expected),
        train_time_per_token=0.0,
        train_time_per_step=train_ticks,
    )
    assert [_trained(batch) for batch in simulate(run).batches] == expected


def _trained(batch: TrainedBatch) -> dict[str, object]:
    return {
        "start_tick": batch.start,
        "version": batch.index,
        "ids": batch.rollout_ids.tolist(),
        "first_lag": batch.first_lags.tolist(),
        "last_lag": batch.last_lags.tolist(),
        "max_lag": batch.max_lag,
        "sum_lag": sum(lag * count for lag, count in batch.lag_histogram.items()),
        "tokens": batch.num_tokens,
    }


def test_april_trace() -> None:
    pairs = [[3, 9], [5, 4], [12, 2], [1, 6], [8, 7], [2, 2], [15, 10]]
    expected = EXPECTED["T3_april_P2_F2"]
    run = SimulatedRun(
        schedule=AprilSchedule(batch_size=4, group_size=2, over_sampling=2.0),
        lengths=CycledLengths([length for pair in pairs for length in pair]),
        step_cost=TICK,
        num_engines=1,
        batch_size=4,
        group_size=2,
        num_steps=len(expected),
        train_time_per_token=0.0,
    )
    result = simulate(run)
    zero = Snapshot._make(0 for _ in Snapshot._fields)
    ends = [zero, zero, *(batch.handed_over for batch in result.batches)]
    seen = []
    for batch, (before, start), (_, end) in zip(result.batches, pairwise(ends), pairwise(ends[1:]), strict=False):
        seen.append(
            {
                "ticks": end.time - start.time,
                "generated": end.generated_tokens - start.generated_tokens,
                "carried_in": start.interrupted_tokens - before.interrupted_tokens,
                "trained_groups": sorted(set((batch.group_ids % len(pairs)).tolist())),
                "trained_tokens": batch.num_tokens,
                "trained_old_tokens": batch.num_tokens - batch.lag_histogram.get(0, 0),
                "max_versions": batch.num_versions.max(),
                "partial": end.num_interrupted - start.num_interrupted,
            }
        )
    assert seen == [{**row, "trained_groups": sorted(row["trained_groups"])} for row in expected]
