"""Exhaustive search over the splits of the GPUs, for the pipeline and for one-step-off RL."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from midflight.errors import ScenarioError
from midflight.sim.costs import rates
from midflight.sim.formulas.analytic import Estimate, one_step_off, whole_steps
from midflight.sim.formulas.steady_state import Queue, steady_states
from midflight.sim.planner.pareto import ParetoFront, front_of
from midflight.sim.workload import Workload
from midflight.types import Int64Array

LagKind = Literal["corrected", "paper"]

_POINTS_AT_ONCE = 2**18  # splits evaluated at once, about 2 MB per array
_MAX_IN_FLIGHT = 1024  # default bound on the sequences per engine


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Splits to search: 1 ... max_in_flight sequences per engine, 1, 2, ... engines that leave a GPU for training."""

    max_in_flight: int
    queue: Queue
    lag: LagKind = "corrected"
    max_mean_lag: float = math.inf  # optimizer steps
    max_trainer_share: float = 1.0


def search_space(workload: Workload, queue: Queue, max_in_flight: int | None = None) -> SearchSpace:
    """Return the space of up to `max_in_flight` sequences per engine (default: 1024, less if the table ends earlier).

    Raises: ScenarioError if `max_in_flight` is less than 1 or beyond the known costs.
    """
    known = workload.step_cost.max_in_flight
    if max_in_flight is None:
        return SearchSpace(int(min(_MAX_IN_FLIGHT, known)), queue)
    if not 1 <= max_in_flight <= known:
        most = f", at most {known:g}, where decode.sizes end" if known < math.inf else ""
        raise ScenarioError(f"max_in_flight = {max_in_flight}: should be at least 1{most}")
    return SearchSpace(max_in_flight, queue)


def pareto_front(workload: Workload, space: SearchSpace) -> ParetoFront:
    """Return the front of all splits in the space; empty if each split keeps the trainer too busy.

    Raises: ScenarioError if every split has a larger mean lag than `space.max_mean_lag`.
    """
    assert space.queue.capacity is not None, "without a queue capacity, lag has no bound"
    scale = workload.max_engines * float(rates(workload.step_cost, space.max_in_flight))  # upper bound on rates
    in_flight = np.arange(1, space.max_in_flight + 1)
    fronts: list[ParetoFront] = []
    lowest_mean_lag = math.inf
    for engines in _chunks(workload.max_engines, space.max_in_flight):
        states = steady_states(workload, engines, space.max_in_flight, space.queue)
        lags = states.lag_bound
        if space.lag == "paper":
            lags = engines[:, None] * in_flight * workload.lengths.max / workload.batch_tokens
        lowest_mean_lag = min(lowest_mean_lag, float(states.mean_lag.min()))
        possible = (states.mean_lag <= space.max_mean_lag) & (states.trainer_share <= space.max_trainer_share)
        row, column = np.nonzero(possible)
        splits = ParetoFront(whole_steps(lags[possible]), states.rate[possible], in_flight[column], engines[row])
        fronts.append(front_of(splits, scale))
    if space.max_mean_lag < lowest_mean_lag:
        raise ScenarioError(
            f"max_mean_lag = {space.max_mean_lag:g}: no split has less than {lowest_mean_lag:.4g}; allow at least that"
        )
    columns = ([getattr(front, field.name) for front in fronts] for field in fields(ParetoFront))
    return front_of(ParetoFront(*map(np.concatenate, columns)), scale)


def best_one_step_off(workload: Workload, steps_per_rl_step: int) -> Estimate | None:
    """Return the fastest split of one-step-off RL, with the fewest engines in a tie.

    None if the table of rates is too short for every split.
    """
    fewest = math.ceil(workload.batch_size * steps_per_rl_step / workload.step_cost.max_in_flight)
    possible = range(max(1, fewest), workload.max_engines + 1)
    estimates = [one_step_off(workload, steps_per_rl_step, num_engines) for num_engines in possible]
    fastest = max((estimate.rate for estimate in estimates), default=0.0)
    # With padded steps, fewer engines can be equally fast.
    return next((estimate for estimate in estimates if estimate.rate >= fastest * (1 - 1e-12)), None)


def _chunks(max_engines: int, max_in_flight: int) -> Iterator[Int64Array]:
    rows = max(1, _POINTS_AT_ONCE // max_in_flight)
    for first in range(1, max_engines + 1, rows):
        yield np.arange(first, min(first + rows, max_engines + 1))
