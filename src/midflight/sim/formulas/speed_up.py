"""Speed-up of the pipeline over conventional RL at the same max lag.

On long fronts, the two are compared at about 400 lags first, then at every lag around the one in question.
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
    """Trained tokens per unit of time by max lag. Shapes: all [P]; a conventional rate is NaN if it is not known."""

    lags: Int64Array
    rates: Float64Array
    conventional_rates: Float64Array

    @property
    def speed_ups(self) -> Float64Array:
        return self.rates / self.conventional_rates


def most_steps_per_rl_step(colocated: Workload) -> float:
    """Largest G of conventional RL with a known step cost; 0 if the GPUs do not divide into engines."""
    if colocated.num_gpus % colocated.gpus_per_engine:
        return 0
    most = colocated.step_cost.max_in_flight * colocated.num_colocated_engines / colocated.batch_size
    return most if math.isinf(most) else math.floor(most + _ROUNDING)


def speed_curve(front: ParetoFront, colocated: Workload) -> Curve:
    """Return the curve at up to 400 lags of the front, denser at low lag."""
    indices = spread(len(front), _NUM_CURVE_POINTS)
    lags = front.lags[indices]
    return Curve(lags, front.rates[indices], _conventional_rates(lags, colocated))


def largest_gain(front: ParetoFront, colocated: Workload) -> int | None:
    """Index of the split with the largest speed-up over conventional RL at the same lag; None if none is known."""
    indices = spread(len(front), _NUM_CURVE_POINTS)
    gains = front.rates[indices] / _conventional_rates(front.lags[indices], colocated)
    if np.isnan(gains).all():
        return None
    peak = int(np.nanargmax(gains))
    around = np.arange(indices[max(0, peak - 1)], indices[min(peak + 1, len(indices) - 1)] + 1)
    gains = front.rates[around] / _conventional_rates(front.lags[around], colocated)
    return int(around[np.nanargmax(gains)])


def first_win(front: ParetoFront, colocated: Workload) -> int | None:
    """Smallest max lag at which a split is faster than conventional RL; None if there is none."""
    indices = spread(len(front), _NUM_CURVE_POINTS)
    wins = front.rates[indices] > _conventional_rates(front.lags[indices], colocated)
    if not wins.any():
        return None
    first = int(wins.argmax())
    between = np.arange(indices[first - 1] + 1 if first else 0, indices[first] + 1)
    lags = front.lags[between]
    return int(lags[front.rates[between] > _conventional_rates(lags, colocated)][0])


def crossover(workload: Workload, colocated: Workload) -> float | None:
    """Max lag g above which the pipeline is faster, approximated for low g: g (g + 1) = N t(0+) L / (tau B Lbar).

    The formula ignores delays and train_time_per_step. None if training takes no time, or if the colocated costs
    differ.
    """
    training = workload.train_time_per_token * workload.batch_tokens
    emptiest = float(workload.step_cost.step_times(1e-6))
    differ = workload.step_cost != colocated.step_cost
    if differ or not training or training != colocated.train_time_per_token * colocated.batch_tokens:
        return None
    product = workload.num_gpus * emptiest * workload.lengths.max / training
    return (math.sqrt(1 + 4 * product) - 1) / 2


def spread(length: int, num: int) -> Int64Array:
    """Return at most `num` indices from 0 to `length` - 1, with growing steps."""
    if length <= num:
        return np.arange(length)
    return np.unique(np.round(np.geomspace(1, length, num)).astype(np.int64)) - 1


def _conventional_rates(lags: Int64Array, colocated: Workload) -> Float64Array:
    most = most_steps_per_rl_step(colocated)
    return np.array([conventional(colocated, lag + 1).rate if lag < most else math.nan for lag in lags.tolist()])
