"""Formulas against the case study of the PipelineRL paper and its consequences.

The case study is partly circular: U(h) was fitted to the figures that the paper prints.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks.planner_runs import decode_rate, share_below, share_until_half

from golden.numbers import EXPECTED, paper_workload
from midflight.sim.costs import PAPER_STEP_COST, RateTable
from midflight.sim.formulas.analytic import conventional, one_step_off, pipeline
from midflight.sim.formulas.draining import drain
from midflight.sim.formulas.speed_up import crossover, first_win, largest_gain
from midflight.sim.formulas.steady_state import Queue
from midflight.sim.lengths import constant, lognormal, uniform
from midflight.sim.planner.pareto import ParetoFront
from midflight.sim.planner.search import best_one_step_off, pareto_front, search_space
from midflight.sim.workload import Workload


def paper_front(workload: Workload) -> ParetoFront:
    """Compute the front by the paper's max lag."""
    return pareto_front(workload, replace(search_space(workload, Queue(workload.batch_size)), lag="paper"))


def speed_up(front: ParetoFront, workload: Workload, max_lag: int) -> float:
    return float(front.up_to(max_lag).rates[-1]) / conventional(workload, max_lag + 1).rate


def best_speed_up(workload: Workload) -> tuple[float, int]:
    """Return the largest speed-up over conventional RL, and its max lag."""
    front = paper_front(workload)
    index = largest_gain(front, workload)
    assert index is not None
    lag = int(front.lags[index])
    return speed_up(front, workload, lag), lag


def scaled(factor: float, **by_size: float) -> RateTable:
    rates = [
        rate * factor * by_size.get(f"u{size}", 1)
        for size, rate in zip(PAPER_STEP_COST.sizes, PAPER_STEP_COST.rates, strict=True)
    ]
    return replace(PAPER_STEP_COST, rates=tuple(rates))


def test_case_study() -> None:
    """Partly circular: U(h) was fitted to these figures."""
    expected = EXPECTED["A1_case_study"]
    workload = paper_workload()
    split, turns = pipeline(workload, expected["H"], expected["I"]), conventional(workload, expected["conv_G"])
    assert workload.lengths.mean == pytest.approx(expected["mean_len"], rel=1e-12)
    assert split.generation_rate == pytest.approx(expected["gen"], rel=5e-3)
    assert split.training_rate == pytest.approx(expected["train"], rel=5e-3)
    assert split.rate == pytest.approx(expected["r"], rel=5e-3)
    assert split.in_flight_steps == pytest.approx(expected["n"], rel=1e-4)
    assert (split.max_lag_paper, split.max_lag) == (expected["g_max"], expected["g_max_corr"])
    assert split.trainer_share == pytest.approx(expected["rho"], rel=1e-3)
    assert split.mean_lag == pytest.approx(expected["mean_lag"], rel=1e-3)
    assert turns.generation_rate == pytest.approx(expected["conv_gen"], rel=5e-3)
    assert turns.training_rate == pytest.approx(expected["conv_train"], rel=5e-3)
    assert turns.rate == pytest.approx(expected["conv_r"], rel=5e-3)
    assert (turns.max_lag, turns.mean_lag) == (132, 66)
    assert split.rate / turns.rate == pytest.approx(expected["speedup"], abs=0.01)


@pytest.mark.parametrize(
    ("key", "num_gpus", "batch_size"),
    [
        ("A2_curve_N128_B128_uniform", 128, 128),
        ("A3_curve_N128_B2048_uniform", 128, 2048),
        ("A4_curve_N8_B128_uniform", 8, 128),
    ],
)
def test_curve_of_rate_against_lag(key: str, num_gpus: int, batch_size: int) -> None:
    expected = EXPECTED[key]
    workload = paper_workload(num_gpus, batch_size)
    front = paper_front(workload)
    for point in expected["points"]:
        lag = point["g"]
        assert front.up_to(lag).rates[-1] == pytest.approx(point["r_pipe"], rel=5e-3), lag
        assert conventional(workload, lag + 1).rate == pytest.approx(point["r_conv"], rel=5e-3), lag
        assert speed_up(front, workload, lag) == pytest.approx(point["speedup"], abs=0.01), lag
    gain, lag = best_speed_up(workload)
    assert gain == pytest.approx(expected["best"]["speedup"], abs=0.01)
    assert abs(lag - expected["best"]["g"]) <= 1
    assert first_win(front, workload) == pytest.approx(expected["first_g_where_pipeline_wins"], abs=1)
    assert crossover(workload, workload) == pytest.approx(expected["crossover_formula"], rel=1e-3)


def test_best_split_of_the_case_study() -> None:
    workload = paper_workload()
    front = paper_front(workload).up_to(132)
    assert (front.lags[-1], front.num_in_flight[-1], front.num_engines[-1]) == (132, 192, 44)


def test_paper_run() -> None:
    expected = EXPECTED["A5_paper_run"]
    workload = paper_workload(batch_size=1024, lengths=lognormal(300, 0.9, 8192))
    split, turns = pipeline(workload, expected["H"], expected["I"]), conventional(workload, expected["conv_G"])
    assert split.rate == pytest.approx(expected["r"], rel=0.01)
    assert split.in_flight_steps == pytest.approx(expected["n"], rel=0.01)
    assert (split.max_lag_paper, split.max_lag) == (expected["g_max"], expected["g_max_corr"])
    assert split.mean_lag == pytest.approx(expected["mean_lag"], rel=0.01)
    assert turns.rate == pytest.approx(expected["conv_r"], rel=0.01)
    assert split.rate / turns.rate == pytest.approx(expected["speedup"], rel=0.01)


def test_both_methods_share_a_limit() -> None:
    limit = EXPECTED["A6_asymptote"]["value"]
    workload = paper_workload()
    many_in_flight = [pipeline(workload, 64 * 300, num_engines).rate for num_engines in range(1, 128)]
    turns = [conventional(workload, steps).rate for steps in (1, 100, 10_000, 1_000_000)]
    assert limit == pytest.approx(128 / (1 / 0.6067 + 4.919), rel=1e-4)
    assert max(*many_in_flight, *turns) <= 128 / (1 / 0.6067 + 4.919)
    assert max(many_in_flight) == pytest.approx(limit, rel=5e-3)
    assert turns[-1] == pytest.approx(limit, rel=5e-3)
    assert turns == sorted(turns)


def test_one_step_off() -> None:
    expected = EXPECTED["A7_onestep_G66"]
    workload = paper_workload()
    best = best_one_step_off(workload, 66)
    assert best is not None
    assert best.num_engines == expected["I"]
    assert best.rate == pytest.approx(expected["r"], rel=5e-3)
    assert best.generation_rate == pytest.approx(expected["gen"], rel=5e-3)
    assert best.training_rate == pytest.approx(expected["train"], rel=5e-3)
    assert (best.max_lag, best.mean_lag) == (expected["g_max"], expected["mean_lag"])
    assert best.rate == max(one_step_off(workload, 66, num_engines).rate for num_engines in range(1, 128))


@pytest.mark.parametrize("num_sequences", [512, 256, 128, 64, 16, 1])
def test_draining_batch(num_sequences: int) -> None:
    expected = EXPECTED["A8_fig2b_2c_uniform"][str(num_sequences)]
    lengths = uniform(8192)
    batch, single = drain(lengths, PAPER_STEP_COST, num_sequences), drain(lengths, PAPER_STEP_COST, 1)
    assert batch.duration / single.duration == pytest.approx(expected["time_over_single"], rel=0.01)
    assert decode_rate(batch) == pytest.approx(expected["tput"], rel=0.01)
    assert share_until_half(batch) == pytest.approx(expected["frac_time_to_half"], rel=0.01)


def test_long_tail_drains_slowly() -> None:
    batch = drain(lognormal(2000, 1.0, 16384), PAPER_STEP_COST, 256)
    assert share_until_half(batch) == pytest.approx(0.14, abs=0.005)
    assert share_below(batch, 64) == pytest.approx(0.74, abs=0.005)


@pytest.mark.parametrize(
    ("key", "num_gpus", "num_engines"),
    [("D1_N128_H192_I40", 128, 40), ("D2_N128_H192_I44", 128, 44), ("D5a_N64_H192_I20", 64, 20)],
)
def test_pipeline_limited_by_generation(key: str, num_gpus: int, num_engines: int) -> None:
    expected = EXPECTED[key]["analytic"]
    split = pipeline(paper_workload(num_gpus, lengths=uniform(1024)), 192, num_engines)
    assert split.rate == pytest.approx(expected["r"], rel=1e-3)
    assert split.in_flight_steps == pytest.approx(expected["n"], rel=1e-3)
    assert split.lag_bound == pytest.approx(expected["max_lag"], rel=1e-3)
    assert split.mean_lag == pytest.approx(expected["mean_lag"], rel=1e-3)


def test_blocking_queue() -> None:
    expected, simulated = EXPECTED["D3_block_I50_q128"]["analytic"], EXPECTED["D3_block_I50_q128"]["sim"]
    split = pipeline(paper_workload(lengths=uniform(1024)), 192, 50, Queue(128))
    assert split.trainer_share == 1
    assert split.rate == pytest.approx(expected["r"], rel=1e-3)
    assert split.in_flight_steps == pytest.approx(expected["n"], rel=1e-3)
    assert split.lag_bound == pytest.approx(expected["max_lag"], rel=1e-3)
    assert split.mean_lag == pytest.approx(expected["mean_lag"], rel=1e-3)
    assert split.mean_lag == pytest.approx(simulated["mean_lag"]["mean"], rel=0.01)
    assert 0.8 <= split.lag_bound - simulated["max_lag_p50"]["mean"] <= 3.5


def test_queue_that_drops_the_oldest() -> None:
    simulated = EXPECTED["D4_drop_I50_q256"]["sim"]
    split = pipeline(paper_workload(lengths=uniform(1024)), 192, 50, Queue(256, "drop_oldest"))
    assert split.rate == pytest.approx(simulated["r"]["mean"], rel=1e-3)
    assert split.mean_lag == pytest.approx(simulated["mean_lag"]["mean"], rel=0.01)
    assert split.lag_bound == pytest.approx(simulated["max_lag_p50"]["mean"], rel=0.02)
    assert split.dropped_share == pytest.approx(simulated["dropped_frac"]["mean"], abs=0.015)


def test_lag_is_infinite_without_queue_capacity() -> None:
    split = pipeline(paper_workload(lengths=uniform(1024)), 192, 50)
    assert split.max_lag == split.mean_lag == math.inf
    assert split.rate == split.training_rate < split.generation_rate


def test_conventional_with_shorter_responses() -> None:
    expected, simulated = EXPECTED["D6_conv_G133"]["analytic"], EXPECTED["D6_conv_G133"]["sim"]
    turns = conventional(paper_workload(lengths=uniform(1024)), expected["G"])
    assert turns.generation_rate == pytest.approx(expected["gen"], rel=1e-3)
    assert turns.training_rate == pytest.approx(expected["train"], rel=1e-3)
    assert turns.rate == pytest.approx(expected["r"], rel=1e-3)
    assert turns.rate == pytest.approx(simulated["r"]["mean"], rel=0.01)
    assert 1 - turns.trainer_share == pytest.approx(simulated["gen_frac"]["mean"], abs=0.005)
    assert (turns.max_lag, turns.mean_lag) == (expected["g_max"], expected["mean_lag"])


# Best speed-up at equal max lag, its lag, and the speed-up at max lag 132, with one change to the case study.
@pytest.mark.parametrize(
    ("changes", "gain", "lag", "gain_at_132"),
    [
        ({"step_cost": scaled(0.25)}, 1.31, 324, 1.15),
        ({"step_cost": scaled(0.33)}, 1.36, 234, 1.21),
        ({"step_cost": scaled(0.5)}, 1.44, 197, 1.32),
        ({"step_cost": scaled(0.75)}, 1.52, 159, 1.45),
        ({"step_cost": scaled(1.25)}, 1.62, 114, 1.59),
        ({"step_cost": scaled(1.5)}, 1.65, 99, 1.54),
        ({"train_time_per_token": 4.919 * 0.8}, 1.53, 153, 1.44),
        ({"train_time_per_token": 4.919 * 1.25}, 1.62, 114, 1.59),
        ({"train_time_per_token": 4.919 * 2}, 1.69, 80, 1.44),
        ({"step_cost": scaled(1, u192=0.95)}, 1.56, 155, 1.50),
        ({"step_cost": scaled(1, u192=1.05)}, 1.63, 129, 1.61),
        ({"step_cost": scaled(1, u64=1 / 1.05, u128=1 / 1.025)}, 1.61, 132, 1.61),
        ({"step_cost": scaled(1, u64=1 / 0.95, u128=1 / 0.975)}, 1.54, 132, 1.54),
        ({"batch_size": 1024}, 1.51, 17, None),
        ({"batch_size": 2048}, 1.46, 8, None),
        ({"num_gpus": 8}, 1.45, 8, None),
        ({"lengths": lognormal(3000, 0.9, 16384)}, 1.59, 255, 1.37),
    ],
)
def test_sensitivity_of_the_speed_up(changes: dict[str, Any], gain: float, lag: int, gain_at_132: float | None) -> None:
    workload = replace(paper_workload(), **changes)
    best, at = best_speed_up(workload)
    assert best == pytest.approx(gain, abs=0.01)
    assert abs(at - lag) <= 2
    if gain_at_132 is not None:
        assert speed_up(paper_front(workload), workload, 132) == pytest.approx(gain_at_132, abs=0.01)


def test_mean_lag_is_two_thirds_at_equal_max_lag() -> None:
    workload = paper_workload()
    split, turns = pipeline(workload, 192, 44), conventional(workload, 133)
    assert split.mean_lag == pytest.approx(2 / 3 * turns.mean_lag, rel=0.03)
    assert split.rate / conventional(workload, 91).rate == pytest.approx(1.99, abs=0.01), "at the same mean lag, 45"


@pytest.mark.parametrize("factor", [0.1, 3.0])
def test_lag_depends_on_the_product_of_speeds(factor: float) -> None:
    workload = paper_workload()
    other = replace(workload, step_cost=scaled(factor), train_time_per_token=workload.train_time_per_token / factor)
    front, other_front = paper_front(workload), paper_front(other)
    assert np.array_equal(front.lags, other_front.lags)
    assert other_front.rates == pytest.approx(front.rates * factor, rel=1e-9)
    assert conventional(other, 30).rate == pytest.approx(conventional(workload, 30).rate * factor, rel=1e-9)


def test_lag_in_samples_is_independent_of_batch_size() -> None:
    in_samples = [
        pipeline(paper_workload(batch_size=batch_size), 192, 44).in_flight_steps * batch_size
        for batch_size in (16, 128, 2048)
    ]
    assert in_samples == pytest.approx([in_samples[0]] * 3, rel=1e-12)


def test_equal_lengths_halve_the_lag_of_the_best_speed_up() -> None:
    gain, lag = best_speed_up(paper_workload(lengths=constant(8192)))
    assert gain == pytest.approx(best_speed_up(paper_workload())[0], abs=0.01)
    assert lag == 66
