"""Duration of simulations: PipelineRL at the ratios of the paper's case study, for any number of GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from midflight.report.machine import describe_machine
from midflight.schedules.pipeline import PipelineSchedule
from midflight.sim.costs import PAPER_STEP_COST, PAPER_TRAIN_TIME_PER_TOKEN
from midflight.sim.lengths import uniform
from midflight.sim.simulator.simulation import SimulatedRun, simulate

_NUM_IN_FLIGHT = 192
_MAX_LENGTH = 1024
_GENERATING = 40 / 128  # share of the GPUs that generate


def bench_simulator(sizes: Sequence[tuple[int, int]], report: Callable[[str], None]) -> dict[str, Any]:
    """Time one simulation per size. `sizes`: number of GPUs, also rollouts per optimizer step, and optimizer steps."""
    rows = []
    for num_gpus, num_steps in sizes:
        run = case_study(num_gpus, num_steps)
        started = time.perf_counter()
        result = simulate(run)
        seconds = time.perf_counter() - started
        num_rollouts = sum(len(batch.lengths) for batch in result.batches)
        rows.append({"gpus": num_gpus, "steps": num_steps, "trained_rollouts": num_rollouts, "seconds": seconds})
        report(f"{num_gpus} GPUs, {num_steps} optimizer steps: {seconds:.1f} s")
    return {"machine": describe_machine(), "rows": rows}


def case_study(num_gpus: int, num_steps: int) -> SimulatedRun:
    num_engines = max(1, round(num_gpus * _GENERATING))
    return SimulatedRun(
        schedule=PipelineSchedule(num_gpus, _NUM_IN_FLIGHT, queue_capacity=10 * num_gpus),
        lengths=uniform(_MAX_LENGTH),
        step_cost=PAPER_STEP_COST,
        num_engines=num_engines,
        batch_size=num_gpus,
        num_steps=num_steps,
        train_time_per_token=PAPER_TRAIN_TIME_PER_TOKEN / (num_gpus - num_engines),
    )
