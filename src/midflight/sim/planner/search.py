"""All splits of the GPUs searched: the fastest by lag, and that of one-step-off RL."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from midflight.errors import ScenarioError
from midflight.sim.costs import rates
from midflight.sim.formulas.analytic import Estimate, one_step_off, whole_steps
from midflight.sim.formulas.steady import Queue, SteadyStates, steady_states
from midflight.sim.planner.pareto import Front, FrontBuilder
from midflight.sim.workload import Workload
from midflight.types import Int64Array

LagKind = Literal["corrected", "paper"]

_POINTS_AT_ONCE = 2**18  # some 2 MB for each figure of theirs
_MAX_IN_FLIGHT = 1024  # unless asked for: sequences on one engine


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """1 ... max_in_flight sequences on each of 1, 2, ... engines that leave a GPU to train."""

    max_in_flight: int
    queue: Queue
    lag: LagKind = "corrected"
    max_mean_lag: float = math.inf  # optimizer steps
    max_trainer_share: float = 1.0


def search_space(workload: Workload, queue: Queue, max_in_flight: int | None = None) -> SearchSpace:
    """With 1024 in flight at most, or as many as the step cost is known for. Raises: ScenarioError if it cannot be."""
    queue.check(workload.batch_size)
    known = workload.step_cost.max_in_flight
    if max_in_flight is None:
        return SearchSpace(int(min(_MAX_IN_FLIGHT, known)), queue)
    if not 1 <= max_in_flight <= known:
        most = f", at most {known:g}, where decode.sizes end" if known < math.inf else ""
        raise ScenarioError(f"max_in_flight = {max_in_flight}: should be at least 1{most}")
    return SearchSpace(max_in_flight, queue)


def pareto_front(workload: Workload, space: SearchSpace) -> Front:
    """Of all splits in the space; empty if they all keep the trainer too busy.

    Raises: ScenarioError if no split has so low a mean lag.
    """
    assert space.queue.max_waiting is not None, "lag has no bound"
    builder = FrontBuilder(workload.max_engines * float(rates(workload.step_cost, space.max_in_flight)))
    lowest_mean_lag = math.inf
    for engines in _chunks(workload.max_engines, space.max_in_flight):
        states = steady_states(workload, engines, space.max_in_flight, space.queue)
        lowest_mean_lag = min(lowest_mean_lag, float(states.mean_lags.min()))
        possible = (states.mean_lags <= space.max_mean_lag) & (states.trainer_shares <= space.max_trainer_share)
        builder.add(engines, _lags(workload, space, engines, states), states.rates, possible)
    if space.max_mean_lag < lowest_mean_lag:
        raise ScenarioError(f"max_mean_lag = {space.max_mean_lag:g}: no split has less than {lowest_mean_lag:.4g}")
    return builder.front()


def best_one_step_off(workload: Workload, steps_per_rl_step: int) -> Estimate | None:
    """Its fastest split, with the fewest engines of several; None if the cost's table is too short for all."""

    def estimate(num_engines: int) -> Estimate:
        return one_step_off(workload, steps_per_rl_step, num_engines)

    started = workload.batch_size * steps_per_rl_step
    fewest = max(1, math.ceil(started / workload.step_cost.max_in_flight))
    possible = range(fewest, workload.max_engines + 1)
    if not possible:
        return None
    # More engines generate faster and leave fewer GPUs to train: the best split is where that crosses over, or near,
    # where delays are what an RL step takes so long for.
    crossing = bisect_left(possible, True, key=lambda number: _is_training_slower(estimate(number)))
    candidates: list[Estimate] = []
    for indices in (range(crossing - 1, -1, -1), range(crossing, len(possible))):
        for index in indices:
            candidates.append(estimate(possible[index]))
            if not _waits_for_delays(candidates[-1]):
                break
    best = max(candidates, key=lambda found: (found.rate, -found.num_engines))
    # Padded steps take as long with some engines fewer.
    up_to_best = range(fewest, best.num_engines)
    as_fast = bisect_left(up_to_best, True, key=lambda number: estimate(number).rate >= best.rate * (1 - 1e-12))
    return estimate(possible[as_fast])


def _is_training_slower(estimate: Estimate) -> bool:
    return estimate.training_rate <= estimate.generation_rate


def _waits_for_delays(estimate: Estimate) -> bool:
    """Whether neither generation nor training alone is what an RL step takes."""
    return estimate.rate < min(estimate.generation_rate, estimate.training_rate) * (1 - 1e-9)


def _chunks(max_engines: int, max_in_flight: int) -> Iterator[Int64Array]:
    rows = max(1, _POINTS_AT_ONCE // max_in_flight)
    for first in range(1, max_engines + 1, rows):
        yield np.arange(first, min(first + rows, max_engines + 1))


def _lags(workload: Workload, space: SearchSpace, engines: Int64Array, states: SteadyStates) -> Int64Array:
    bounds = states.lag_bounds
    if space.lag == "paper":
        in_flight = engines[:, None] * np.arange(1, space.max_in_flight + 1)
        bounds = in_flight * workload.lengths.max / workload.batch_tokens
    return whole_steps(bounds)
