"""How fast each schedule would be and how old its tokens: closed formulas.

Source: PipelineRL, appendix A, with what it leaves out: training that takes time, delays, and rollouts that wait.
`max_lag_paper` is the paper's figure.
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

_ROUNDING = 1e-9  # 132.00000000000003 optimizer steps are 132
_NO_QUEUE = Queue()


@dataclass(frozen=True, slots=True)
class Estimate:
    """Rates are trained tokens per unit of time, lags are in optimizer steps."""

    num_engines: int  # that generate
    num_training_gpus: int
    num_in_flight: int | None  # sequences on each engine; None: a batch as a whole
    steps_per_rl_step: int  # 1 of the pipeline
    rate: float
    generation_rate: float  # if it never had to wait for training
    training_rate: float  # if it never had to wait for generation
    period: float  # time per optimizer step
    trainer_share: float  # of the time, that the trainer works
    in_flight_steps: float  # n: while the longest response is generated; 0 if no weights change meanwhile
    lag_bound: float  # of a token, before it is rounded up to whole steps
    max_lag_paper: int
    mean_lag: float
    dropped_share: float = 0.0  # of generated rollouts

    @property
    def max_lag(self) -> float:
        """Whole optimizer steps; infinite if lag grows without limit."""
        return self.lag_bound if math.isinf(self.lag_bound) else int(whole_steps(self.lag_bound))


def whole_steps(lags: npt.ArrayLike) -> Int64Array:
    """Rounded up, elementwise."""
    whole: Int64Array = np.ceil(np.asarray(lags, np.float64) - _ROUNDING).astype(np.int64)
    return whole


def conventional(workload: Workload, steps_per_rl_step: int) -> Estimate:
    """All GPUs generate G batches, then all train on them, in turns.

    An RL step takes one after another: generation of G B rollouts, preprocess of the first batch (that of others goes
    on beside training), G training times, transfer, update_pause. Engines stand still anyway while batches are made
    up. Batch j of 0 ... G - 1 has lag j. Fluid: with few rollouts on an engine it waits for the longest possible one.
    Raises: ScenarioError if GPUs do not divide into engines, or an engine's share is beyond the cost's table.
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
    """Some GPUs generate the next G batches while the others train on the last G; weights change in between.

    RL step k + 2 is generated after RL step k is trained on. So an RL step takes as long as the slower of generation
    (with its pauses) and G training times, or half of both with transfer and preprocess, whichever is longest. Fluid,
    as conventional RL is.
    Raises: ScenarioError if no GPU is left to train, or an engine's share is beyond the cost's table.
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
    """Engines always have H sequences in flight and adopt weights after each optimizer step; see `steady`.

    If training is the slower one and nothing limits how many rollouts wait, lag is infinite: it grows and grows.
    Raises: ScenarioError if no GPU is left to train, or H is beyond the cost's table.
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
    share = workload.batch_size * steps_per_rl_step / num_engines  # that each engine starts with
    return drain(workload.lengths, workload.step_cost, share).duration


def _in_phases(
    workload: Workload,
    steps_per_rl_step: int,
    split: tuple[int, int],
    times: tuple[float, float, float],
    training_rate: float,
    lags: tuple[int, float],
) -> Estimate:
    """`split`: engines, training GPUs; `times` of an RL step: generation, training, all of it; `lags`: max, mean."""
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
