"""The pipeline's steady state for all splits of the GPUs at once: speed and lag.

    D    period, time per optimizer step        n    optimizer steps while the longest response is generated
    rho  trainer's share of D that it works     x    delays, in periods

Between a token and the optimizer step that trains on it lie the rest of its sequence, a wait until its batch is
complete (half a period on average), and the delays. Counted in the optimizer steps that end meanwhile, that is a mean
lag of mean age * n + rho + x, and n + rho + x at most: the last step to end did so 1 - rho before this one starts.

If training is the slower one, rho is 1 and rollouts wait. With a queue of Q that blocks, slots stay empty until the a
of H I that are left make as much as is trained: I U(a / I) = r_train. What finishes then has Q + H I - a before it, of
which B leave in a period. A ring of Q that drops the oldest is always full, and what is trained on is the oldest B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from midflight.config.schedules import check_max_waiting
from midflight.errors import ScenarioError
from midflight.sim.workload import Workload
from midflight.types import BoolArray, Float64Array, Int64Array

WhenFull = Literal["block", "drop_oldest"]


@dataclass(frozen=True, slots=True)
class Queue:
    """Finished rollouts that wait to be trained on; without a `max_waiting` they are never too many."""

    max_waiting: int | None = None  # Q, rollouts
    when_full: WhenFull = "block"

    def check(self, batch_size: int) -> None:
        """Raises: ScenarioError if a batch could never fill up."""
        try:
            check_max_waiting(self.max_waiting, batch_size)
        except ValueError as error:
            raise ScenarioError(str(error)) from error


@dataclass(frozen=True, slots=True)
class SteadyStates:
    """Rows are numbers of engines, columns 1 ... max_in_flight sequences on each.

    Shapes: training_rates, training_times [I, 1]; everything else [I, H].
    Units: rates tokens per unit of time, trained or, of generation, if it never had to wait; lags optimizer steps.
    """

    rates: Float64Array
    generation_rates: Float64Array
    training_rates: Float64Array
    periods: Float64Array
    in_flight_steps: Float64Array  # n
    trainer_shares: Float64Array  # rho
    lag_bounds: Float64Array  # before they are rounded up to whole steps
    mean_lags: Float64Array
    dropped_shares: Float64Array


def steady_states(workload: Workload, num_engines: Int64Array, max_in_flight: int, queue: Queue) -> SteadyStates:
    """Of 1 ... `max_in_flight` sequences on each of `num_engines` [I]. Raises: ScenarioError past the cost's table."""
    engines = num_engines[:, None].astype(np.float64)
    step_times = workload.steady_step_times(np.arange(1, max_in_flight + 1))
    speeds = engines * (np.arange(1, max_in_flight + 1) / step_times)
    training = workload.training_times(workload.num_gpus - engines * workload.gpus_per_engine)
    # Of a ring, the next batch is only taken once engines can have the last one's weights.
    unavailable = workload.transfer + workload.preprocess if queue.when_full == "drop_oldest" else 0.0
    generation_periods = workload.batch_tokens / speeds + workload.pause
    training_periods = training + unavailable
    periods = np.maximum(generation_periods, training_periods)
    in_flight_steps = workload.lengths.max * step_times / (periods - workload.pause)
    shares = training / periods
    delays = shares + (workload.transfer + workload.preprocess) / periods
    waits = _Waits(in_flight_steps, delays, delays, np.zeros_like(periods))
    waiting = generation_periods <= training_periods
    if waiting.any():
        late = _waits_for_trainer(workload, engines, step_times, periods, queue)
        waits = waits.replaced(waiting, late)
    return SteadyStates(
        rates=workload.batch_tokens / periods,
        generation_rates=workload.batch_tokens / generation_periods,
        training_rates=np.divide(
            workload.batch_tokens,
            training_periods,
            out=np.full_like(training_periods, math.inf),
            where=training_periods > 0,
        ),
        periods=periods,
        in_flight_steps=waits.in_flight_steps,
        trainer_shares=shares,
        lag_bounds=waits.in_flight_steps + waits.longest,
        mean_lags=workload.mean_age * waits.in_flight_steps + waits.mean,
        dropped_shares=waits.dropped,
    )


@dataclass(frozen=True, slots=True)
class _Waits:
    """What follows from who waits for whom. Shapes: all [I, H]."""

    in_flight_steps: Float64Array
    longest: Float64Array  # optimizer steps between a sequence's end and its training
    mean: Float64Array
    dropped: Float64Array  # share of sequences

    def replaced(self, where: BoolArray, other: _Waits) -> _Waits:
        return _Waits(
            np.where(where, other.in_flight_steps, self.in_flight_steps),
            np.where(where, other.longest, self.longest),
            np.where(where, other.mean, self.mean),
            np.where(where, other.dropped, self.dropped),
        )


def _waits_for_trainer(
    workload: Workload, engines: Float64Array, step_times: Float64Array, periods: Float64Array, queue: Queue
) -> _Waits:
    """Valid where generation is not the slower one."""
    batch_size, decoding = workload.batch_size, periods - workload.pause
    slots = np.arange(1, len(step_times) + 1)
    in_flight_steps = workload.lengths.max * step_times / decoding
    nothing = np.zeros_like(periods)
    if queue.max_waiting is None:
        forever = np.full_like(periods, math.inf)
        return _Waits(in_flight_steps, forever, forever, nothing)
    if queue.when_full == "drop_oldest":
        arrivals = engines * slots / step_times * decoding / workload.lengths.mean  # rollouts in a period
        longest = queue.max_waiting / arrivals + 1
        mean = (queue.max_waiting - batch_size / 2) / arrivals + 0.5
        return _Waits(in_flight_steps, longest, mean, 1 - batch_size / arrivals)
    active = _active_slots(workload, step_times, workload.batch_tokens / (engines * decoding))
    # Preprocessing is over before a batch's turn comes. Until weights arrive, the queue does not shrink either: the
    # versions that tokens miss by that are those that they wait less.
    waiting = ((slots - active) * engines + queue.max_waiting) / batch_size
    in_flight_steps = active * engines * workload.lengths.max / workload.batch_tokens
    return _Waits(in_flight_steps, waiting + 1, waiting + 0.5, nothing)


def _active_slots(workload: Workload, step_times: Float64Array, rates: Float64Array) -> Float64Array:
    """The a <= H with U(a) = rate of an engine, the largest one, `[I, H]`.

    Emptied from H slots, an engine is there first; where padding makes U go up and down, there are others. Between two
    whole numbers of sequences t is linear, t(j) = t(j + 1) - slope, or jumps right after j where a padded size begins.
    """
    slots = np.arange(1, len(step_times) + 1)
    slopes = 2 * (step_times - workload.steady_step_times(slots - 0.5))
    slow_enough = np.where(slots / step_times <= rates, slots, 0)
    below = np.maximum.accumulate(slow_enough, axis=1)
    after = np.minimum(below, len(slots) - 1)  # index of the size below + 1
    slope = slopes[after]
    with np.errstate(divide="ignore", invalid="ignore"):  # at splits where nothing waits, which are not used
        active = rates * (step_times[after] - slope * slots[after]) / (1 - rates * slope)
    return np.clip(active, below, np.minimum(below + 1, slots))
