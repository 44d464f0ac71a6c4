"""Steady state of the pipeline for all splits of the GPUs at once: speed and lag.

    D    period, time per optimizer step        n    optimizer steps during the longest response
    rho  share of D in which the trainer works  x    delays, in periods

Three things happen between a token and the optimizer step that trains on it: the rest of its sequence is sampled, the
batch fills up (half a period on average), and the delays pass. The lag is the number of optimizer steps that end in
that time. Its mean is mean age * n + rho + x, its maximum n + rho + x: the last step to end did so 1 - rho periods
before this one starts.

If training is slower than generation, rho is 1 and rollouts wait in a queue of capacity Q:

- A queue that blocks leaves slots empty until the a of H I slots that stay active produce as much as is trained:
  I U(a / I) = r_train. A rollout that finishes then has Q + H I - a rollouts before it, and B of them leave per period.
- A queue that drops the oldest is always full, and a batch is its oldest B rollouts.
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
    """Queue of finished rollouts before the trainer; unbounded if `capacity` is None."""

    capacity: int | None = None  # Q, rollouts; at least a batch
    when_full: Literal["block", "drop_oldest"] = "block"


@dataclass(frozen=True, slots=True)
class SteadyStates:
    """Steady state of each split: rows are numbers of engines, columns are 1 ... max_in_flight sequences per engine.

    Shapes: training_rate [I, 1]; all other fields [I, H].
    Units: rates in tokens per unit of time, generation_rate and training_rate as if that side never had to wait; lags
        in optimizer steps.
    """

    rate: Float64Array
    generation_rate: Float64Array
    training_rate: Float64Array
    period: Float64Array
    trainer_share: Float64Array  # rho
    in_flight_steps: Float64Array  # n
    lag_bound: Float64Array  # before rounding up to whole steps
    mean_lag: Float64Array
    dropped_share: Float64Array  # share of generated rollouts


def steady_states(workload: Workload, num_engines: Int64Array, max_in_flight: int, queue: Queue) -> SteadyStates:
    """Return the states of 1 ... `max_in_flight` sequences per engine, for each of `num_engines` [I].

    Raises: ScenarioError if `max_in_flight` is beyond the table of rates.
    """
    engines = num_engines[:, None].astype(np.float64)
    step_times = workload.steady_step_times(np.arange(1, max_in_flight + 1))
    speeds = engines * (np.arange(1, max_in_flight + 1) / step_times)
    training = workload.training_times(workload.num_gpus - engines * workload.gpus_per_engine)
    # A queue that drops the oldest hands out the next batch only after the previous batch's weights can be adopted.
    unavailable = workload.transfer + workload.preprocess if queue.when_full == "drop_oldest" else 0.0
    generation_period = workload.batch_tokens / speeds + workload.pause
    training_period = training + unavailable
    period = np.maximum(generation_period, training_period)
    share = training / period
    delay = share + (workload.transfer + workload.preprocess) / period
    in_flight_steps = workload.lengths.max * step_times / (period - workload.pause)
    # Steps in flight; optimizer steps from a sequence's end to its training, largest and mean; share of dropped
    # sequences.
    waits: tuple[Float64Array, ...] = (in_flight_steps, delay, delay, np.zeros_like(period))
    waiting = generation_period <= training_period
    if waiting.any():
        with_waiting = _waits_for_trainer(workload, engines, step_times, period, queue)
        waits = tuple(np.where(waiting, *both) for both in zip(with_waiting, waits, strict=True))
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
    """Return the same four arrays as `waits` there, valid where training is the slower side. Shapes: all [I, H]."""
    batch_size, decoding = workload.batch_size, period - workload.pause
    slots = np.arange(1, len(step_times) + 1)
    in_flight_steps = workload.lengths.max * step_times / decoding
    no_drops = np.zeros_like(period)
    if queue.capacity is None:
        unlimited = np.full_like(period, math.inf)
        return in_flight_steps, unlimited, unlimited, no_drops
    if queue.when_full == "drop_oldest":
        arrivals = engines * slots / step_times * decoding / workload.lengths.mean  # rollouts in a period
        mean = (queue.capacity - batch_size / 2) / arrivals + 0.5
        return in_flight_steps, queue.capacity / arrivals + 1, mean, 1 - batch_size / arrivals
    active = _active_slots(workload, step_times, workload.batch_tokens / (engines * decoding))
    # Preprocessing of a batch ends before its training is due, so it adds no lag. Nor does the transfer: tokens sampled
    # before the weights arrive lack that version, and wait correspondingly less, as the queue does not shrink until
    # then.
    waiting = ((slots - active) * engines + queue.capacity) / batch_size
    in_flight_steps = active * engines * workload.lengths.max / workload.batch_tokens
    return in_flight_steps, waiting + 1, waiting + 0.5, no_drops


def _active_slots(workload: Workload, step_times: Float64Array, rates: Float64Array) -> Float64Array:
    """Return the largest a <= H with U(a) = the required rate of an engine, `[I, H]`.

    Padding makes U go up and down, so there can be several such a. An engine that empties from H slots reaches the
    largest one first. Between two whole numbers of sequences, t is linear, t(j) = t(j + 1) - slope, or jumps right
    after j if a padded size begins there.
    """
    slots = np.arange(1, len(step_times) + 1)
    slopes = 2 * (step_times - workload.steady_step_times(slots - 0.5))
    slow_enough = np.where(slots / step_times <= rates, slots, 0)
    below = np.maximum.accumulate(slow_enough, axis=1)
    after = np.minimum(below, len(slots) - 1)  # index of the size below + 1
    slope = slopes[after]
    with np.errstate(divide="ignore", invalid="ignore"):  # at splits where no rollout waits, whose values are not used
        active = rates * (step_times[after] - slope * slots[after]) / (1 - rates * slope)
    return np.clip(active, below, np.minimum(below + 1, slots))
