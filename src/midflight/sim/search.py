"""The splits of the GPUs worth knowing: for every lag, the fastest that has no more."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from midflight.errors import ScenarioError
from midflight.sim.analytic import Estimate, one_step_off, pipeline, whole_steps
from midflight.sim.costs import rates
from midflight.sim.steady import Queue, SteadyStates, steady_states
from midflight.sim.workload import Workload
from midflight.types import BoolArray, Float64Array, Int64Array

LagKind = Literal["corrected", "paper"]

_POINTS_AT_ONCE = 2**18  # some 2 MB for each figure of theirs
_MAX_IN_FLIGHT = 1024  # unless asked for: sequences on one engine
_DIGITS = 12  # rates that agree so far are the same, and only rounded differently


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """1 ... max_in_flight sequences on each of 1, 2, ... engines that leave a GPU to train."""

    max_in_flight: int
    queue: Queue
    lag: LagKind = "corrected"
    max_mean_lag: float = math.inf  # optimizer steps
    max_trainer_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Front:
    """Splits that no other beats in both lag and rate, slow ones first. Shapes: all [F].

    Of those with the same lag and rate, the one with the fewest in flight, then the fewest engines.
    """

    lags: Int64Array  # max_lag, optimizer steps, going up
    rates: Float64Array  # trained tokens per unit of time, going up
    num_in_flight: Int64Array
    num_engines: Int64Array

    def __len__(self) -> int:
        return len(self.lags)

    def up_to(self, max_lag: int) -> Front:
        end = int(np.searchsorted(self.lags, max_lag, side="right"))
        return Front(self.lags[:end], self.rates[:end], self.num_in_flight[:end], self.num_engines[:end])

    def estimate(self, workload: Workload, queue: Queue, index: int) -> Estimate:
        """Of the split at `index`, in full."""
        slots, engines = int(self.num_in_flight[index]), int(self.num_engines[index])
        return pipeline(workload, slots, engines, queue.max_waiting, queue.when_full)


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
    """All splits searched; memory does not grow with their number.

    Raises: ScenarioError if no split has so low a mean lag; an empty front if all keep the trainer too busy.
    """
    assert space.queue.max_waiting is not None, "lag has no bound"
    scale = workload.max_engines * float(rates(workload.step_cost, space.max_in_flight))
    best = np.full(1, -math.inf)  # rate of the fastest split so far, by lag
    fastest, its_lag, lowest_mean_lag = -math.inf, 0, math.inf
    kept: list[Front] = []
    for engines in _chunks(workload.max_engines, space.max_in_flight):
        states = steady_states(workload, engines, space.max_in_flight, space.queue)
        lags = _lags(workload, space, engines, states)
        lowest_mean_lag = min(lowest_mean_lag, float(states.mean_lags.min()))
        possible = (states.mean_lags <= space.max_mean_lag) & (states.trainer_shares <= space.max_trainer_share)
        if not possible.any():
            continue
        its_rates = np.where(possible, np.round(states.rates / scale, _DIGITS), -math.inf)
        if its_rates.max() >= fastest:
            lag = int(lags[its_rates == its_rates.max()].min())
            its_lag = lag if its_rates.max() > fastest else min(lag, its_lag)
            fastest = float(its_rates.max())
        best = _grown(best, its_lag + 1)
        possible &= lags <= its_lag
        np.maximum.at(best, lags[possible], its_rates[possible])
        best = np.maximum.accumulate(best)
        kept.append(_improving(best, possible, lags, its_rates, engines))
    if not kept and space.max_mean_lag < lowest_mean_lag:
        raise ScenarioError(f"max_mean_lag = {space.max_mean_lag:g}: no split has less than {lowest_mean_lag:.4g}")
    return _front(kept, scale)


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


def _grown(best: Float64Array, length: int) -> Float64Array:
    """Lags that were not met yet are at best as fast as the last."""
    return best if len(best) >= length else np.pad(best, (0, length - len(best)), mode="edge")


def _improving(
    best: Float64Array, possible: BoolArray, lags: Int64Array, its_rates: Float64Array, engines: Int64Array
) -> Front:
    """Those that are the fastest of their lag, and faster than all of a lower one."""
    with_less = np.concatenate([[-math.inf], best])
    lag = np.where(possible, lags, 0)
    rows, columns = np.nonzero(possible & (its_rates >= best[lag]) & (its_rates > with_less[lag]))
    return Front(lags[rows, columns], its_rates[rows, columns], columns + 1, engines[rows])


def _front(kept: list[Front], scale: float) -> Front:
    lags = np.concatenate([np.zeros(0, np.int64), *(each.lags for each in kept)])
    scaled = np.concatenate([np.zeros(0), *(each.rates for each in kept)])
    slots = np.concatenate([np.zeros(0, np.int64), *(each.num_in_flight for each in kept)])
    engines = np.concatenate([np.zeros(0, np.int64), *(each.num_engines for each in kept)])
    order = np.lexsort((engines, slots, -scaled, lags))
    before = np.maximum.accumulate(np.concatenate([[-math.inf], scaled[order]]))[:-1]
    order = order[scaled[order] > before]
    return Front(lags[order], scaled[order] * scale, slots[order], engines[order])
