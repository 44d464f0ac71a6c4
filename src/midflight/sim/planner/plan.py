"""How to split the GPUs: the fastest split within a bound on lag, or the least lag at a speed, and what else there is.

Conventional RL stands beside each split, with as many optimizer steps per RL step as give it the same max lag.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from midflight.errors import ScenarioError
from midflight.sim.formulas.analytic import Estimate, conventional, pipeline
from midflight.sim.formulas.speed_up import (
    Curve,
    crossover,
    first_win,
    largest_gain,
    most_steps_per_rl_step,
    speed_curve,
    spread,
)
from midflight.sim.planner.pareto import ParetoFront
from midflight.sim.planner.search import LagKind, SearchSpace, best_one_step_off, pareto_front
from midflight.sim.workload import Workload

BUSY_SHARE = 0.95  # a trainer that is busier is soon the slower one, and rollouts wait
ROOMY_SHARE = 0.87
_NUM_ROWS = 8
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Goal:
    """The fastest within the bounds; or, with a `rate`, the one with the least lag that is as fast."""

    max_lag: int | None = None  # optimizer steps
    max_mean_lag: float | None = None  # optimizer steps
    rate: float | None = None  # trained tokens per unit of time


@dataclass(frozen=True, slots=True)
class Choice:
    """A split, and conventional RL at the same max lag; None if its step cost is not known."""

    max_lag: int  # of the kind that was planned with
    split: Estimate
    conventional: Estimate | None

    @property
    def speed_up(self) -> float | None:
        return self.split.rate / self.conventional.rate if self.conventional else None


@dataclass(frozen=True, slots=True)
class Plan:
    lag: LagKind
    best: Choice
    roomy: Choice | None  # instead of `best`, if that keeps the trainer all but too busy
    largest_gain: Choice | None  # over conventional RL, within the bounds
    one_step_off: Estimate | None  # at no more max lag than `best`
    first_win: int | None  # the least max lag at which the pipeline is faster than conventional RL
    crossover: float | None  # the same by a formula for low lags
    rows: tuple[Choice, ...]  # of the front, slow ones first
    curve: Curve
    notes: tuple[str, ...]
    as_written: Choice | None  # the scenario's own split


def make_plan(
    workload: Workload, colocated: Workload, goal: Goal, space: SearchSpace, written: Estimate | None = None
) -> Plan:
    """`colocated` is the same work where generation and training take turns; `written` a split to compare with.

    The curve, and where the pipeline is faster, are those of all splits, whatever the goal.

    Raises: ScenarioError naming the bound that cannot be kept, and the nearest that can.
    """
    _check(goal)
    within = space if goal.max_mean_lag is None else replace(space, max_mean_lag=goal.max_mean_lag)
    front = pareto_front(workload, within)
    everything = front if within is space else pareto_front(workload, space)
    bounded = front.up_to(goal.max_lag)
    index = _index_for(bounded, goal)
    if not len(bounded):
        raise ScenarioError(f"max_lag = {goal.max_lag}: no split has less than {front.lags[0]}")
    if index == len(bounded):
        scope = "" if goal.max_lag is None and goal.max_mean_lag is None else " within the bounds on lag"
        raise ScenarioError(f"rate = {goal.rate:g}: no split{scope} is faster than {bounded.rates[-1]:.5g}")

    def choose(front: ParetoFront, index: int) -> Choice:
        split = pipeline(workload, int(front.num_in_flight[index]), int(front.num_engines[index]), space.queue)
        return _beside_conventional(split, space.lag, colocated)

    best, roomy = choose(front, index), None
    if best.split.trainer_share > BUSY_SHARE:
        calm = pareto_front(workload, replace(within, max_trainer_share=ROOMY_SHARE)).up_to(goal.max_lag)
        if 0 <= (index_of_calm := _index_for(calm, goal)) < len(calm):
            roomy = choose(calm, index_of_calm)
    gain = largest_gain(bounded, colocated)
    curve = speed_curve(everything, colocated)
    shown = {*spread(len(bounded), _NUM_ROWS).tolist(), index, *([] if gain is None else [gain])}
    return Plan(
        lag=space.lag,
        best=best,
        roomy=roomy,
        largest_gain=None if gain is None else choose(bounded, gain),
        one_step_off=best_one_step_off(workload, (best.max_lag + 1) // 2) if best.max_lag else None,
        first_win=first_win(everything, colocated),
        crossover=crossover(workload, colocated),
        rows=tuple(choose(front, each) for each in sorted(shown)),
        curve=curve,
        notes=tuple(_notes(best, roomy, colocated, curve)),
        as_written=None if written is None else _beside_conventional(written, space.lag, colocated),
    )


def _beside_conventional(split: Estimate, lag: LagKind, colocated: Workload) -> Choice:
    max_lag = split.max_lag_paper if lag == "paper" else int(split.max_lag)
    known = max_lag < most_steps_per_rl_step(colocated)
    return Choice(max_lag, split, conventional(colocated, max_lag + 1) if known else None)


def _check(goal: Goal) -> None:
    for name, bound in asdict(goal).items():
        if bound is not None and not bound >= 0:  # nor NaN
            raise ScenarioError(f"{name} = {bound:g}: should be at least 0")


def _index_for(front: ParetoFront, goal: Goal) -> int:
    """The fastest split, or the first that is as fast as the goal; outside of the front if there is none."""
    return len(front) - 1 if goal.rate is None else int(np.searchsorted(front.rates, goal.rate * (1 - _ROUNDING)))


def _notes(best: Choice, roomy: Choice | None, colocated: Workload, curve: Curve) -> list[str]:
    notes: list[str] = []
    if best.split.trainer_share > BUSY_SHARE:
        instead = (
            "no split within the bounds leaves it room"
            if roomy is None
            else f"with {roomy.split.num_in_flight} in flight on {roomy.split.num_engines} engines it is busy"
            f" {roomy.split.trainer_share:.0%} of the time, at {roomy.split.rate / best.split.rate:.0%} of the rate"
        )
        notes.append(
            f"the trainer is busy {best.split.trainer_share:.0%} of the time: one hiccup, and rollouts wait for it and"
            f" grow old; {instead}"
        )
    if colocated.num_gpus % colocated.gpus_per_engine:
        notes.append(
            f"no conventional RL to compare with: {colocated.num_gpus} GPUs are not a multiple of"
            f" {colocated.gpus_per_engine} per engine"
        )
    elif np.isnan(curve.conventional_rates).any():
        most = most_steps_per_rl_step(colocated)
        notes.append(
            f"conventional RL is not known{f' beyond a lag of {most - 1:.0f}' if most else ''}: its engines would start"
            " with more sequences than the table of decoding rates has"
        )
    return notes
