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

from midflight.sim.workload import Workload
from midflight.types import Float64Array, Int64Array


@dataclass(frozen=True, slots=True)
class Queue:
    """Finished rollouts that wait to be trained on; without a `capacity` they are never too many."""

    capacity: int | None = None  # Q, rollouts; at least a batch
    when_full: Literal["block", "drop_oldest"] = "block"


@dataclass(frozen=True, slots=True)
class SteadyStates:
    """Rows are numbers of engines, columns 1 ... max_in_flight sequences on each.

    Shapes: training_rate [I, 1]; everything else [I, H].
    Units: rates tokens per unit of time, trained or, of generation, if it never had to wait; lags optimizer steps.
    """

    rate: Float64Array
    generation_rate: Float64Array
    training_rate: Float64Array
    period: Float64Array
    trainer_share: Float64Array  # rho
    in_flight_steps: Float64Array  # n
    lag_bound: Float64Array  # before it is rounded up to whole steps
    mean_lag: Float64Array
    dropped_share: Float64Array  # of sequences


def steady_states(workload: Workload, num_engines: Int64Array, max_in_flight: int, queue: Queue) -> SteadyStates:
    """Of 1 ... `max_in_flight` sequences on each of `num_engines` [I]. Raises: ScenarioError past the cost's table."""
    engines = num_engines[:, None].astype(np.float64)
    step_times = workload.steady_step_times(np.arange(1, max_in_flight + 1))
    speeds = engines * (np.arange(1, max_in_flight + 1) / step_times)
    training = workload.training_times(workload.num_gpus - engines * workload.gpus_per_engine)
    # Of a ring, the next batch is only taken once engines can have the last one's weights.
    unavailable = workload.transfer + workload.preprocess if queue.when_full == "drop_oldest" else 0.0
    generation_period = workload.batch_tokens / speeds + workload.pause
    training_period = training + unavailable
    period = np.maximum(generation_period, training_period)
    share = training / period
    delay = share + (workload.transfer + workload.preprocess) / period
    in_flight_steps = workload.lengths.max * step_times / (period - workload.pause)
    # Steps in flight, optimizer steps between a sequence's end and its training, at most and on average, and the share
    # of sequences that are dropped.
    waits: tuple[Float64Array, ...] = (in_flight_steps, delay, delay, np.zeros_like(period))
    waiting = generation_period <= training_period
    if waiting.any():
        late = _waits_for_trainer(workload, engines, step_times, period, queue)
        waits = tuple(np.where(waiting, *both) for both in zip(late, waits, strict=True))
    in_flight_steps, longest, mean, dropped = waits
    unlimited = np.full_like(training_period, math.inf)
    return SteadyStates(
        rate=workload.batch_tokens / period,
        generation_rate=workload.batch_tokens / generation_period,
        training_rate=np.divide(workload.batch_tokens, training_period, out=unlimited, where=training_period > 0),
        period=period,
        trainer_share=share,
        in_flight_steps=in_flight_steps,
        lag_bound=in_flight_steps + longest,
        mean_lag=workload.mean_age * in_flight_steps + mean,
        dropped_share=dropped,
    )


def _waits_for_trainer(
    workload: Workload, engines: Float64Array, step_times: Float64Array, period: Float64Array, queue: Queue
) -> tuple[Float64Array, ...]:
    """As in `steady_states`, valid where generation is not the slower one. Shapes: all [I, H]."""
    batch_size, decoding = workload.batch_size, period - workload.pause
    slots = np.arange(1, len(step_times) + 1)
    in_flight_steps = workload.lengths.max * step_times / decoding
    nothing = np.zeros_like(period)
    if queue.capacity is None:
        forever = np.full_like(period, math.inf)
        return in_flight_steps, forever, forever, nothing
    if queue.when_full == "drop_oldest":
        arrivals = engines * slots / step_times * decoding / workload.lengths.mean  # rollouts in a period
        mean = (queue.capacity - batch_size / 2) / arrivals + 0.5
        return in_flight_steps, queue.capacity / arrivals + 1, mean, 1 - batch_size / arrivals
    active = _active_slots(workload, step_times, workload.batch_tokens / (engines * decoding))
    # Preprocessing is over before a batch's turn comes. Until weights arrive, the queue does not shrink either: the
    # versions that tokens miss by that are those that they wait less.
    waiting = ((slots - active) * engines + queue.capacity) / batch_size
    in_flight_steps = active * engines * workload.lengths.max / workload.batch_tokens
    return in_flight_steps, waiting + 1, waiting + 0.5, nothing


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
