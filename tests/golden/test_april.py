"""APRIL: its gain, which depends on the slope of the decode step's cost, and the age of its trained tokens.

Batches have 32 groups of 8. Lengths vary between groups and less within groups, as measured for math problems.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from benchmarks.restart_baseline import restart_baseline

from golden.numbers import EXPECTED
from midflight.protocols import Schedule
from midflight.schedules.april import AprilSchedule
from midflight.sim.costs import AffineCost
from midflight.sim.lengths import GroupedLogNormal
from midflight.sim.simulator.result import SimulationResult
from midflight.sim.simulator.simulation import SimulatedRun, simulate

GROUP_SIZE = 8
BATCH_SIZE = 32 * GROUP_SIZE
LENGTHS = GroupedLogNormal(median=4000, group_sigma=0.8, sigma=0.3, max_length=16384)
NUM_WARM_UP = 20
NUM_STEPS = 120 + NUM_WARM_UP
PER_64 = AffineCost(1.0, 1 / 64)


def run_of(schedule: Schedule, cost: AffineCost, seed: int, filter_rate: float = 0.0) -> SimulatedRun:
    return SimulatedRun(
        schedule=schedule,
        lengths=LENGTHS,
        step_cost=cost,
        num_engines=1,
        batch_size=BATCH_SIZE,
        group_size=GROUP_SIZE,
        num_steps=NUM_STEPS,
        train_time_per_token=0.0,
        filter_rate=filter_rate,
        seed=seed,
    )


@cache
def over_sampled(over_sampling: float, cost: AffineCost) -> list[SimulationResult]:
    schedule = AprilSchedule(BATCH_SIZE, GROUP_SIZE, over_sampling)
    return [simulate(run_of(schedule, cost, seed)).after(NUM_WARM_UP) for seed in range(3)]


def gain(over_sampling: float, cost: AffineCost) -> float:
    """Rate of generated tokens, relative to waiting for all rollouts."""
    own, waiting = over_sampled(over_sampling, cost), over_sampled(1.0, cost)
    return float(np.mean([run.generated_rate for run in own]) / np.mean([run.generated_rate for run in waiting]))


def test_lengths_match_the_measurement() -> None:
    lengths = LENGTHS.draw(np.random.default_rng(0), 0, 20_000, GROUP_SIZE)
    expected = EXPECTED["P0_lengths"]
    assert lengths.mean() == pytest.approx(expected["mean"], rel=0.02)
    assert np.median(lengths) == pytest.approx(expected["median"], rel=0.02)
    assert lengths.std() == pytest.approx(expected["std_batch"], rel=0.02)
    assert lengths.std(axis=1).mean() == pytest.approx(expected["std_group"], rel=0.1)
    assert (lengths == 16384).mean() == pytest.approx(expected["p_clip"], abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cost"),
    [("P1_flat_t", AffineCost(1.0)), ("P2_affine_64", PER_64), ("P3_affine_32", AffineCost(1.0, 1 / 32))],
)
def test_gain_over_waiting_for_all(name: str, cost: AffineCost) -> None:
    assert gain(2.0, cost) == pytest.approx(EXPECTED[name]["gain"]["mean"], rel=0.04)


def eight_gpus(num_parameters: float) -> AffineCost:
    """Cost of four engines of two GPUs as one (seconds): 16-bit, half of 2 x 2.65 TB/s, 147 kB of KV per token."""
    bandwidth, num_engines = 0.5 * 5.3e12, 4
    arithmetic = 2 * num_parameters / (2 * 0.5 * 989e12)
    return AffineCost(1e-3 + 2 * num_parameters / bandwidth, arithmetic / num_engines, 147e3 / bandwidth / num_engines)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_parameters"), [("P4_phys_4B", 4.02e9), ("P5_phys_8B", 8.19e9)])
def test_kv_reads_limit_the_gain(name: str, num_parameters: float) -> None:
    """The gain is far below a flat step cost's (`P1_flat_t`), and larger for the larger model."""
    assert gain(2.0, eight_gpus(num_parameters)) == pytest.approx(EXPECTED[name]["gain"]["mean"], rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("over_sampling", [1.25, 1.5, 2.0, 3.0])
def test_over_sampling_raises_speed_and_age(over_sampling: float) -> None:
    is_reference = over_sampling == 2.0
    expected: dict[str, Any] = (
        EXPECTED["P2_affine_64"] if is_reference else EXPECTED["P6_F_sweep_affine64"][f"{over_sampling:g}"]
    )
    runs = over_sampled(over_sampling, PER_64)
    assert gain(over_sampling, PER_64) == pytest.approx(expected["gain"]["mean"], rel=0.04)
    versions = np.concatenate([run.num_versions for run in runs])
    assert abs(versions.max() - expected["vmax"]["mean"]) <= 1
    assert (versions == 1).mean() == pytest.approx(expected["v1"]["mean"], abs=0.02)
    shares = {
        "carried_cum": np.mean([run.carried_in_fraction for run in runs]),
        "carried_seg": np.mean([run.carried_once_fraction for run in runs]),
        "trained_off": np.mean([run.figures()["old_token_fraction"] for run in runs]),
    }
    for name, share in shares.items():
        assert share == pytest.approx(expected[name]["mean"], abs=0.02), name


@pytest.mark.slow
def test_no_over_sampling_waits_for_all() -> None:
    for run in over_sampled(1.0, PER_64):
        assert run.num_versions.max() == 1
        assert run.carried_in_fraction == 0
        assert run.figures()["old_token_fraction"] == 0


@pytest.mark.slow
def test_dynamic_sampling_with_half_of_the_groups_filtered() -> None:
    expected = EXPECTED["P7_dapo_filt.5_affine64"]
    over = AprilSchedule(BATCH_SIZE, GROUP_SIZE, 2.0, refill="over_sampled")
    runs = [simulate(run_of(over, PER_64, seed, filter_rate=0.5)).after(NUM_WARM_UP) for seed in range(5)]
    alone = restart_baseline(run_of(over, PER_64, 0, filter_rate=0.5), range(1000, 1500))
    gain_trained = np.mean([run.rate for run in runs]) / alone.rate
    assert gain_trained == pytest.approx(expected["gain_trained"]["mean"], rel=0.06)
    gain_generated = np.mean([run.generated_rate for run in runs]) / alone.generated_rate
    assert gain_generated == pytest.approx(expected["gain"]["mean"], rel=0.03)
    assert alone.thrown_away_fraction == pytest.approx(expected["base_wasted"]["mean"], abs=0.02)
