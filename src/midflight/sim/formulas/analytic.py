"""Speed and lag of each schedule, as closed formulas.

Source: PipelineRL, appendix A, extended by training time, delays and waiting rollouts, which the paper leaves out.
`max_lag_paper` is the paper's own value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from midflight.sim.formulas.draining import drain
from midflight.sim.formulas.steady_state import Queue, steady_states
from midflight.sim.workload import Workload
from midflight.types import Int64Array

_ROUNDING = 1e-9  # so that 132.00000000000003 optimizer steps are not rounded up to 133
_NO_QUEUE = Queue()


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted speed and lag of one schedule on one split; rates in trained tokens per unit of time, lags in steps."""

    num_engines: int
    num_training_gpus: int
    num_in_flight: int | None  # sequences per engine; None if a whole batch starts at once
    steps_per_rl_step: int  # 1 for the pipeline
    rate: float
    generation_rate: float  # if generation never had to wait for training
    training_rate: float  # if training never had to wait for generation
    period: float  # time per optimizer step
    trainer_share: float  # share of the time in which the trainer is busy
    in_flight_steps: float  # n: optimizer steps during the longest response; 0 if weights do not change in flight
    lag_bound: float  # largest lag of a token, before rounding up to whole steps
    max_lag_paper: int
    mean_lag: float
    dropped_share: float = 0.0  # share of generated rollouts

    @property
    def max_lag(self) -> float:
        """Largest lag of a token in whole optimizer steps; infinite if lag grows without limit."""
        return self.lag_bound if math.isinf(self.lag_bound) else int(whole_steps(self.lag_bound))


def whole_steps(lags: npt.ArrayLike) -> Int64Array:
    """Return `lags` rounded up to whole steps, elementwise."""
    steps: Int64Array = np.ceil(np.asarray(lags, np.float64) - _ROUNDING).astype(np.int64)
    return steps


def conventional(workload: Workload, steps_per_rl_step: int) -> Estimate:
    """Estimate conventional RL: all GPUs generate G batches, then all GPUs train on them.

    The duration of an RL step is the sum of: generation of G B rollouts, preprocess of the first batch (later batches
    are preprocessed during training), G training times, transfer, update_pause. Batches are assembled while engines
    are idle anyway, so handover_pause does not count. Batch j of 0 ... G - 1 has lag j. The model is fluid: with few
    rollouts per engine, it assumes that each engine waits for the longest possible response.
    Raises: ScenarioError if GPUs do not divide into engines, or an engine's share is beyond the table of rates.
    """
    engines = workload.num_colocated_engines
    generation = _generation_time(workload, steps_per_rl_step, engines)
    training = float(workload.training_times(workload.num_gpus))
    delays = workload.preprocess + workload.transfer + workload.update_pause
    return _in_phases(
        workload,
        steps_per_rl_step,
        (engines, workload.num_gpus),
        (generation, steps_per_rl_step * training, generation + delays + steps_per_rl_step * training),
        _rate(workload.batch_tokens, training),
        lags=(steps_per_rl_step - 1, (steps_per_rl_step - 1) / 2),
    )


def one_step_off(workload: Workload, steps_per_rl_step: int, num_engines: int) -> Estimate:
    """Estimate one-step-off RL: engines generate the next G batches while the other GPUs train on the last G.

    Weights change only between RL steps, and RL step k + 2 is generated after training on RL step k. So an RL step
    lasts as long as the longest of three: generation with its pauses; G training times; half the sum of generation,
    training, transfer and preprocess. The model is fluid, as for conventional RL.
    Raises: ScenarioError if no GPU is left for training, or an engine's share is beyond the table of rates.
    """
    workload.check_num_engines(num_engines)
    generation = _generation_time(workload, steps_per_rl_step, num_engines) + workload.pause
    num_training_gpus = workload.num_gpus - num_engines * workload.gpus_per_engine
    training = steps_per_rl_step * float(workload.training_times(num_training_gpus))
    in_turn = (generation + training + workload.transfer + workload.preprocess) / 2
    return _in_phases(
        workload,
        steps_per_rl_step,
        (num_engines, num_training_gpus),
        (generation, training, max(generation, training, in_turn)),
        _rate(steps_per_rl_step * workload.batch_tokens, training),
        lags=(2 * steps_per_rl_step - 1, 1.5 * steps_per_rl_step - 0.5),
    )


def pipeline(workload: Workload, num_in_flight: int, num_engines: int, queue: Queue = _NO_QUEUE) -> Estimate:
    """Estimate the pipeline: H sequences in flight per engine, new weights after each step; see `steady_state`.

    If training is slower than generation and the queue has no capacity, lag grows without limit and is infinite.
    Raises: ScenarioError if no GPU is left for training, or H is beyond the table of rates.
    """
    workload.check_num_engines(num_engines)
    states = steady_states(workload, np.array([num_engines]), num_in_flight, queue)
    return Estimate(
        num_engines=num_engines,
        num_training_gpus=workload.num_gpus - num_engines * workload.gpus_per_engine,
        num_in_flight=num_in_flight,
        steps_per_rl_step=1,
        max_lag_paper=int(whole_steps(num_in_flight * num_engines * workload.lengths.max / workload.batch_tokens)),
        **{field.name: float(getattr(states, field.name)[0, -1]) for field in fields(states)},
    )


def _generation_time(workload: Workload, steps_per_rl_step: int, num_engines: int) -> float:
    share = workload.batch_size * steps_per_rl_step / num_engines  # rollouts that each engine starts with
    return drain(workload.lengths, workload.step_cost, share).duration


def _in_phases(
    workload: Workload,
    steps_per_rl_step: int,
    split: tuple[int, int],
    times: tuple[float, float, float],
    training_rate: float,
    lags: tuple[int, float],
) -> Estimate:
    """Build an estimate.

    `split`: engines, training GPUs. `times`: generation, training, total of an RL step. `lags`: max, mean.
    """
    generation, training, duration = times
    tokens = steps_per_rl_step * workload.batch_tokens
    return Estimate(
        num_engines=split[0],
        num_training_gpus=split[1],
        num_in_flight=None,
        steps_per_rl_step=steps_per_rl_step,
        rate=tokens / duration,
        generation_rate=tokens / generation,
        training_rate=training_rate,
        period=duration / steps_per_rl_step,
        trainer_share=training / duration,
        in_flight_steps=0.0,
        lag_bound=lags[0],
        max_lag_paper=lags[0],
        mean_lag=lags[1],
    )


def _rate(tokens: float, time: float) -> float:
    return tokens / time if time else math.inf
