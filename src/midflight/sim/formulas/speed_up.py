"""Where the pipeline is faster than conventional RL at the same max lag, and how many times as fast.

On long fronts both are compared at some 400 lags, and then at all lags around the one that is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from midflight.sim.formulas.analytic import conventional
from midflight.sim.planner.pareto import ParetoFront
from midflight.sim.workload import Workload
from midflight.types import Float64Array, Int64Array

_NUM_CURVE_POINTS = 400
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Curve:
    """Trained tokens per unit of time by max lag. Shapes: all [P]; conventional rates NaN where not known."""

    lags: Int64Array
    rates: Float64Array
    conventional_rates: Float64Array

    @property
    def speed_ups(self) -> Float64Array:
        return self.rates / self.conventional_rates


def most_steps_per_rl_step(colocated: Workload) -> float:
    """G of conventional RL before engines hold more than their step cost is known for; 0 if GPUs are left over."""
    if colocated.num_gpus % colocated.gpus_per_engine:
        return 0
    most = colocated.step_cost.max_in_flight * colocated.num_colocated_engines / colocated.batch_size
    return most if math.isinf(most) else math.floor(most + _ROUNDING)


def speed_curve(front: ParetoFront, colocated: Workload) -> Curve:
    """At up to 400 lags of the front, close together where lag is low."""
    indices = spread(len(front), _NUM_CURVE_POINTS)
    lags = front.lags[indices]
    return Curve(lags, front.rates[indices], _conventional_rates(lags, colocated))


def largest_gain(front: ParetoFront, colocated: Workload) -> int | None:
    """Index of the split that is the most times as fast as conventional RL at its lag."""
    indices = spread(len(front), _NUM_CURVE_POINTS)
    gains = front.rates[indices] / _conventional_rates(front.lags[indices], colocated)
    if np.isnan(gains).all():
        return None
    peak = int(np.nanargmax(gains))
    around = np.arange(indices[max(0, peak - 1)], indices[min(peak + 1, len(indices) - 1)] + 1)
    gains = front.rates[around] / _conventional_rates(front.lags[around], colocated)
    return int(around[np.nanargmax(gains)])


def first_win(front: ParetoFront, colocated: Workload) -> int | None:
    """The least max lag at which a split is faster than conventional RL; None if there is none."""
    indices = spread(len(front), _NUM_CURVE_POINTS)
    wins = front.rates[indices] > _conventional_rates(front.lags[indices], colocated)
    if not wins.any():
        return None
    first = int(wins.argmax())
    between = np.arange(indices[first - 1] + 1 if first else 0, indices[first] + 1)
    lags = front.lags[between]
    return int(lags[front.rates[between] > _conventional_rates(lags, colocated)][0])


def crossover(workload: Workload, colocated: Workload) -> float | None:
    """The max lag g from which on the pipeline is faster, if that is low: g (g + 1) = N t(0+) L / (tau B Lbar).

    Not for delays or training times of whole steps. None if training takes no time, or costs differ in turns.
    """
    training = workload.train_time_per_token * workload.batch_tokens
    emptiest = float(workload.step_cost.step_times(1e-6))
    differ = workload.step_cost != colocated.step_cost
    if differ or not training or training != colocated.train_time_per_token * colocated.batch_tokens:
        return None
    product = workload.num_gpus * emptiest * workload.lengths.max / training
    return (math.sqrt(1 + 4 * product) - 1) / 2


def spread(length: int, num: int) -> Int64Array:
    """Indices from 0 to `length` - 1, at most `num` of them, with growing steps."""
    if length <= num:
        return np.arange(length)
    return np.unique(np.round(np.geomspace(1, length, num)).astype(np.int64)) - 1


def _conventional_rates(lags: Int64Array, colocated: Workload) -> Float64Array:
    most = most_steps_per_rl_step(colocated)
    return np.array([conventional(colocated, lag + 1).rate if lag < most else math.nan for lag in lags.tolist()])
