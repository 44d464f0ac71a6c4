"""Plan of a cluster: the fastest split within a bound on lag, or the lowest lag at a given speed, and alternatives.

Each split is compared with conventional RL that takes the number of optimizer steps per RL step with the same max lag.
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

BUSY_SHARE = 0.95  # above this share, a small slowdown makes the trainer the slower side, and rollouts wait
ROOMY_SHARE = 0.87  # trainer share of the alternative that leaves room
_NUM_ROWS = 8
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Goal:
    """Fastest split within the bounds; with a `rate`, the split with the lowest lag that reaches the rate."""

    max_lag: int | None = None  # optimizer steps
    max_mean_lag: float | None = None  # optimizer steps
    rate: float | None = None  # trained tokens per unit of time


@dataclass(frozen=True, slots=True)
class Choice:
    """A split, and conventional RL at the same max lag; None if conventional RL's step cost is not known."""

    max_lag: int  # of the plan's kind: corrected or the paper's
    split: Estimate
    conventional: Estimate | None

    @property
    def speed_up(self) -> float | None:
        return self.split.rate / self.conventional.rate if self.conventional else None


@dataclass(frozen=True, slots=True)
class Plan:
    lag: LagKind
    best: Choice
    roomy: Choice | None  # alternative if `best` keeps the trainer busier than BUSY_SHARE
    largest_gain: Choice | None  # over conventional RL, within the bounds
    one_step_off: Estimate | None  # at no more max lag than `best`
    first_win: int | None  # smallest max lag at which the pipeline is faster than conventional RL
    crossover: float | None  # the same, by a formula for low lags
    rows: tuple[Choice, ...]  # selected splits of the front, slow ones first
    curve: Curve
    notes: tuple[str, ...]
    as_written: Choice | None  # the scenario's own split


def make_plan(
    workload: Workload, colocated: Workload, goal: Goal, space: SearchSpace, written: Estimate | None = None
) -> Plan:
    """Find the best split for the goal, and compare it with alternatives and with conventional RL.

    `colocated` is the same work with generation and training in turns; `written` is a split to compare with. The curve
    and the smallest lag at which the pipeline is faster cover all splits, whatever the goal.

    Raises: ScenarioError naming the bound that no split keeps, and the nearest possible value.
    """
    _check(goal)
    within = space if goal.max_mean_lag is None else replace(space, max_mean_lag=goal.max_mean_lag)
    front = pareto_front(workload, within)
    unbounded = front if within is space else pareto_front(workload, space)
    bounded = front.up_to(goal.max_lag)
    index = _index_for(bounded, goal)
    if not len(bounded):
        raise ScenarioError(f"max_lag = {goal.max_lag}: no split has less than {front.lags[0]}; allow at least that")
    if index == len(bounded):
        scope = "" if goal.max_lag is None and goal.max_mean_lag is None else " within the bounds on lag"
        raise ScenarioError(f"rate = {goal.rate:g}: no split{scope} is faster than {bounded.rates[-1]:.5g}")

    def choose(front: ParetoFront, index: int) -> Choice:
        split = pipeline(workload, int(front.num_in_flight[index]), int(front.num_engines[index]), space.queue)
        return _beside_conventional(split, space.lag, colocated)

    best, roomy = choose(front, index), None
    if best.split.trainer_share > BUSY_SHARE:
        roomy_front = pareto_front(workload, replace(within, max_trainer_share=ROOMY_SHARE)).up_to(goal.max_lag)
        if 0 <= (roomy_index := _index_for(roomy_front, goal)) < len(roomy_front):
            roomy = choose(roomy_front, roomy_index)
    gain = largest_gain(bounded, colocated)
    curve = speed_curve(unbounded, colocated)
    shown = {*spread(len(bounded), _NUM_ROWS).tolist(), index, *([] if gain is None else [gain])}
    return Plan(
        lag=space.lag,
        best=best,
        roomy=roomy,
        largest_gain=None if gain is None else choose(bounded, gain),
        one_step_off=best_one_step_off(workload, (best.max_lag + 1) // 2) if best.max_lag else None,
        first_win=first_win(unbounded, colocated),
        crossover=crossover(workload, colocated),
        rows=tuple(choose(front, row) for row in sorted(shown)),
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
    """Index of the fastest split, or of the first that reaches the goal's rate; outside the front if there is none."""
    return len(front) - 1 if goal.rate is None else int(np.searchsorted(front.rates, goal.rate * (1 - _ROUNDING)))


def _notes(best: Choice, roomy: Choice | None, colocated: Workload, curve: Curve) -> list[str]:
    notes: list[str] = []
    if best.split.trainer_share > BUSY_SHARE:
        instead = (
            "no split within the bounds leaves the trainer more room"
            if roomy is None
            else f"with {roomy.split.num_in_flight} in flight on {roomy.split.num_engines} engines, it is busy"
            f" {roomy.split.trainer_share:.0%} of the time, at {roomy.split.rate / best.split.rate:.0%} of the rate"
        )
        notes.append(
            f"the trainer is busy {best.split.trainer_share:.0%} of the time: after a short delay of the trainer,"
            f" rollouts wait and their lag grows; {instead}"
        )
    if colocated.num_gpus % colocated.gpus_per_engine:
        notes.append(
            f"no comparison with conventional RL: {colocated.num_gpus} GPUs are not a multiple of"
            f" {colocated.gpus_per_engine} per engine"
        )
    elif np.isnan(curve.conventional_rates).any():
        most = most_steps_per_rl_step(colocated)
        notes.append(
            f"conventional RL is not known{f' beyond a lag of {most - 1:.0f}' if most else ''}: its engines would start"
            " with more sequences than the largest size in the table of decoding rates"
        )
    return notes
