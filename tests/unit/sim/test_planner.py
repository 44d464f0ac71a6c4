"""Planner: the search equals brute force, plans keep their bounds, impossible goals are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from midflight.errors import ScenarioError
from midflight.sim.costs import PAPER_STEP_COST, AffineCost, RateTable
from midflight.sim.formulas.analytic import Estimate, conventional, one_step_off, pipeline
from midflight.sim.formulas.speed_up import first_win, largest_gain, speed_curve
from midflight.sim.formulas.steady_state import Queue
from midflight.sim.lengths import lognormal, uniform
from midflight.sim.planner.plan import Goal, make_plan
from midflight.sim.planner.search import SearchSpace, best_one_step_off, pareto_front, search_space
from midflight.sim.workload import Workload

CASE_STUDY = Workload(128, 128, uniform(8192), PAPER_STEP_COST, 4.919)
PADDED = RateTable((2, 8, 16), (1.0, 2.5, 3.5), pad_to=4, beyond="hold")
SMALL = {
    "table": Workload(7, 4, uniform(30), PADDED, 0.8),
    "delays": replace(
        Workload(6, 3, lognormal(9, 0.6, 40), AffineCost(2.0, 0.1, 0.01), 1.0), transfer=9.0, preprocess=4
    ),
    "pauses": replace(Workload(9, 5, uniform(20), PADDED, 1.5, 3.0), gpus_per_engine=2, update_pause=2.0),
    "linear": Workload(5, 6, uniform(25), AffineCost(0.0, 0.5), 0.4),
}


def brute_force(workload: Workload, space: SearchSpace) -> list[Estimate]:
    """Compute the front by trying every split, with ties broken by the number in flight, then the engines."""
    tried = [
        pipeline(workload, in_flight, engines, space.queue)
        for in_flight in range(1, space.max_in_flight + 1)
        for engines in range(1, workload.max_engines + 1)
    ]
    kept = [split for split in tried if split.mean_lag <= space.max_mean_lag]
    kept = [split for split in kept if split.trainer_share <= space.max_trainer_share]
    kept.sort(key=lambda split: lag_of(split, space))  # stable: fewer in flight, then fewer engines come first
    front: list[Estimate] = []
    for lag in sorted({lag_of(split, space) for split in kept}):
        same_lag = [split for split in kept if lag_of(split, space) == lag]
        fastest = max(split.rate for split in same_lag)
        best = next(split for split in same_lag if split.rate >= fastest * (1 - 1e-10))
        if not front or best.rate > front[-1].rate * (1 + 1e-10):
            front.append(best)
    return front


def lag_of(estimate: Estimate, space: SearchSpace) -> float:
    return estimate.max_lag_paper if space.lag == "paper" else estimate.max_lag


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lag": "paper"},
        {"max_mean_lag": 1.7},
        {"max_trainer_share": 0.8},
        {"queue": Queue(13)},
        {"queue": Queue(13, "drop_oldest")},
    ],
    ids=str,
)
def test_search_equals_brute_force(name: str, changes: dict[str, Any]) -> None:
    workload = SMALL[name]
    space = replace(search_space(workload, Queue(workload.batch_size), 24), **changes)
    front, expected = pareto_front(workload, space), brute_force(workload, space)
    assert expected
    assert front.lags.tolist() == [lag_of(split, space) for split in expected]
    assert front.num_in_flight.tolist() == [split.num_in_flight for split in expected]
    assert front.num_engines.tolist() == [split.num_engines for split in expected]
    assert front.rates == pytest.approx([split.rate for split in expected], rel=1e-9)


def test_chunk_size_does_not_change_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    space = search_space(CASE_STUDY, Queue(128), 300)
    unchunked = pareto_front(CASE_STUDY, space)
    monkeypatch.setattr("midflight.sim.planner.search._POINTS_AT_ONCE", 1000)
    chunked = pareto_front(CASE_STUDY, space)
    assert len(unchunked) > 50
    for name in ("lags", "rates", "num_in_flight", "num_engines"):
        assert np.array_equal(getattr(unchunked, name), getattr(chunked, name))


@pytest.mark.parametrize("delay", [0.0, 30.0, 3000.0])
@pytest.mark.parametrize("name", SMALL)
def test_one_step_off_search_equals_brute_force(name: str, delay: float) -> None:
    workload = replace(SMALL[name], transfer=delay)
    tried = [one_step_off(workload, 3, engines) for engines in range(1, workload.max_engines + 1)]
    fastest = max(split.rate for split in tried)
    assert best_one_step_off(workload, 3) == next(split for split in tried if split.rate >= fastest * (1 - 1e-12))


def test_one_step_off_stays_within_the_table() -> None:
    workload = replace(SMALL["table"], step_cost=replace(PADDED, beyond="error"))
    best = best_one_step_off(workload, 16)
    assert best is not None
    assert best.num_engines >= 4 * 16 / 16
    assert best_one_step_off(workload, 25) is None


def plan_of(goal: Goal) -> tuple[int, float, float]:
    best = make_plan(CASE_STUDY, CASE_STUDY, goal, search_space(CASE_STUDY, Queue(128))).best
    return best.max_lag, best.split.mean_lag, best.split.rate


def test_fastest_split_keeps_the_bounds() -> None:
    _, _, fastest = plan_of(Goal())
    lag, _, rate = plan_of(Goal(max_lag=60))
    assert lag <= 60
    assert rate < fastest
    lag, mean_lag, within_both = plan_of(Goal(max_lag=60, max_mean_lag=10))
    assert lag <= 60
    assert mean_lag <= 10
    assert within_both < rate


def test_lowest_lag_at_a_rate() -> None:
    lag, _, rate = plan_of(Goal(rate=12.0))
    assert rate >= 12
    assert plan_of(Goal(max_lag=lag))[2] == pytest.approx(rate)
    assert plan_of(Goal(max_lag=lag - 1))[2] < 12
    assert plan_of(Goal(rate=rate))[0] == lag, "the rate of a plan can be used as a goal"


def test_conventional_rl_is_compared_at_equal_max_lag() -> None:
    best = make_plan(CASE_STUDY, CASE_STUDY, Goal(max_lag=60), search_space(CASE_STUDY, Queue(128))).best
    assert best.conventional is not None
    assert best.conventional.max_lag == best.max_lag == 60
    assert best.speed_up == pytest.approx(best.split.rate / conventional(CASE_STUDY, 61).rate)


def test_busy_trainer_gets_a_note_and_an_alternative() -> None:
    plan = make_plan(CASE_STUDY, CASE_STUDY, Goal(max_lag=132), search_space(CASE_STUDY, Queue(128)))
    assert plan.best.split.trainer_share > 0.95
    assert plan.roomy is not None
    assert plan.roomy.split.trainer_share <= 0.87
    assert plan.roomy.max_lag <= 132
    assert plan.roomy.split.rate < plan.best.split.rate
    (note,) = plan.notes
    assert "the trainer is busy 99% of the time" in note
    assert f"with {plan.roomy.split.num_in_flight} in flight on {plan.roomy.split.num_engines} engines" in note
    relaxed = make_plan(CASE_STUDY, CASE_STUDY, Goal(max_lag=20), search_space(CASE_STUDY, Queue(128)))
    assert (relaxed.roomy, relaxed.notes) == (None, ())


def test_note_if_no_split_relieves_the_trainer() -> None:
    slow = replace(CASE_STUDY, num_gpus=2, train_time_per_token=100.0)
    plan = make_plan(slow, slow, Goal(), search_space(slow, Queue(128)))
    assert plan.best.split.trainer_share == 1
    assert plan.roomy is not None
    assert plan.roomy.split.trainer_share <= 0.87
    plan = make_plan(slow, slow, Goal(rate=plan.best.split.rate), search_space(slow, Queue(128)))
    assert plan.roomy is None
    assert "no split within the bounds leaves the trainer more room" in plan.notes[0]


def test_first_win_and_curve_ignore_the_goal() -> None:
    space = search_space(CASE_STUDY, Queue(128))
    unbounded = make_plan(CASE_STUDY, CASE_STUDY, Goal(), space)
    bounded = make_plan(CASE_STUDY, CASE_STUDY, Goal(max_mean_lag=1.0), space)
    assert unbounded.first_win == bounded.first_win == 15
    assert np.array_equal(unbounded.curve.lags, bounded.curve.lags)


def test_long_fronts_are_sampled_accurately() -> None:
    workload = replace(CASE_STUDY, num_gpus=1024)
    front = pareto_front(workload, search_space(workload, Queue(128)))
    assert len(front) > 800
    gains = front.rates / [conventional(workload, lag + 1).rate for lag in front.lags.tolist()]
    index = largest_gain(front, workload)
    assert index is not None
    assert gains[index] == pytest.approx(gains.max(), rel=1e-3)
    assert first_win(front, workload) == front.lags[(gains > 1).argmax()]
    assert len(speed_curve(front, workload).lags) <= 400


def test_conventional_rl_is_unknown_beyond_the_table() -> None:
    turns = replace(SMALL["table"], step_cost=RateTable((2, 4), (1.0, 1.5)))
    plan = make_plan(SMALL["table"], turns, Goal(), search_space(SMALL["table"], Queue(4), 24))
    # Seven engines with 4 sequences each hold 7 batches.
    known = plan.curve.lags < 7
    assert not known.all()
    assert np.array_equal(known, np.isfinite(plan.curve.conventional_rates))
    assert plan.best.conventional is None
    assert plan.best.speed_up is None
    assert any("conventional RL is not known beyond a lag of 6" in note for note in plan.notes)


def test_no_conventional_rl_if_gpus_do_not_divide() -> None:
    workload = SMALL["pauses"]
    plan = make_plan(workload, workload, Goal(), search_space(workload, Queue(5), 24))
    assert np.isnan(plan.curve.conventional_rates).all()
    assert (plan.first_win, plan.largest_gain) == (None, None)
    assert any("9 GPUs are not a multiple of 2 per engine" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (Goal(max_lag=0), "max_lag = 0: no split has less than 1"),
        (Goal(max_lag=-1), "max_lag = -1: should be at least 0"),
        (Goal(max_mean_lag=1e-4), "max_mean_lag = 0.0001: no split has less than 0.005"),
        (Goal(max_mean_lag=math.nan), "max_mean_lag = nan: should be at least 0"),
        (Goal(rate=20), "rate = 20: no split is faster than 19.4"),
        (Goal(rate=12, max_lag=20), "rate = 12: no split within the bounds on lag is faster than 2.78"),
        (Goal(rate=-1), "rate = -1: should be at least 0"),
    ],
)
def test_impossible_goal_is_refused(goal: Goal, message: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        make_plan(CASE_STUDY, CASE_STUDY, goal, search_space(CASE_STUDY, Queue(128)))
    assert message in str(raised.value)


def test_invalid_search_space_is_refused() -> None:
    table = replace(CASE_STUDY, step_cost=RateTable((1, 64), (0.1, 0.2)))
    assert search_space(table, Queue(128)).max_in_flight == 64
    with pytest.raises(ScenarioError, match=r"max_in_flight = 65: should be at least 1, at most 64"):
        search_space(table, Queue(128), 65)
    with pytest.raises(ScenarioError, match=r"cluster.num_gpus = 1: too few"):
        pareto_front(replace(CASE_STUDY, num_gpus=1), SearchSpace(8, Queue(128)))


@pytest.mark.slow
def test_plan_of_ten_thousand_gpus_fits_in_memory() -> None:
    workload = replace(CASE_STUDY, num_gpus=10_000)
    front = pareto_front(workload, search_space(workload, Queue(128)))
    assert front.rates[-1] == pytest.approx(10_000 / (1 / 0.6067 + 4.919), rel=1e-3)


def test_note_if_table_is_too_short_for_conventional_rl() -> None:
    turns = replace(SMALL["table"], batch_size=100, step_cost=RateTable((2, 4), (1.0, 1.5)))
    workload = replace(SMALL["table"], batch_size=100)
    plan = make_plan(workload, turns, Goal(), search_space(workload, Queue(100), 24))
    assert any(note.startswith("conventional RL is not known: its engines") for note in plan.notes)
