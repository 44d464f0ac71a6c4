"""Scenarios: shipped files work, and a wrong scenario gives one clear line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config import dump_toml, load_scenario
from midflight.launch.planning import estimate_scenario, plan_scenario
from midflight.launch.scenarios import build_workload, scenario_schedule
from midflight.schedules.april import AprilSchedule
from midflight.sim.costs import AffineCost
from midflight.sim.formulas.analytic import one_step_off
from midflight.sim.planner.plan import Goal
from refusals import Refused

ROOT = Path(__file__).parents[3]
SCENARIOS = sorted((ROOT / "scenarios").glob("*.toml"))
PAPER = ROOT / "scenarios" / "paper.toml"
TWO_POINT = ["lengths.type=two_point", "lengths.short=1", "lengths.long=2"]
LOGNORMAL = ["lengths.type=lognormal", "lengths.median=10", "lengths.max=100"]
TABLE = ["decode.type=table", "decode.sizes=[1,64]", "decode.rates=[0.1,0.2]"]


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.name)
def test_shipped_scenario_loads(path: Path) -> None:
    scenario = load_scenario(path)
    schedule = scenario_schedule(scenario)
    workload = build_workload(scenario, schedule.colocated)
    assert workload.batch_size % scenario.batch.group_size == 0
    if not schedule.colocated:
        assert plan_scenario(scenario, Goal(), "corrected").as_written is not None


def test_case_study_matches_the_paper() -> None:
    written = estimate_scenario(load_scenario(PAPER))
    assert written is not None
    assert written.rate == pytest.approx(16.905, rel=1e-4)
    assert (written.max_lag_paper, written.num_training_gpus) == (132, 84)


def test_april_scenario_starts_twice_the_groups() -> None:
    scenario = load_scenario(ROOT / "scenarios" / "april.toml")
    assert scenario_schedule(scenario) == AprilSchedule(256, 8, 2.0, None, None)
    workload = build_workload(scenario, colocated=True)
    assert workload.step_cost == AffineCost(1.0, 1 / 64)
    assert workload.lengths.max == 16384
    assert workload.lengths.mean == pytest.approx(5361.8, rel=0.01)


def test_colocated_costs_replace_the_split_costs(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(
        '[cluster]\nnum_gpus = 4\n[decode]\ntype = "affine"\nbase = 2.0\n[training]\ntime_per_token = 3.0\n'
        '[colocated_decode]\ntype = "affine"\nbase = 1.0\ngpus_per_engine = 2\n[colocated_training]\n'
        "time_per_token = 1.0\ntime_per_step = 7.0\n[colocated_delays]\ntransfer = 5.0\n[delays]\npreprocess = 6.0\n"
    )
    scenario = load_scenario(path)
    split, turns = build_workload(scenario, colocated=False), build_workload(scenario, colocated=True)
    assert (split.step_cost, split.gpus_per_engine) == (AffineCost(2.0), 1)
    assert (turns.step_cost, turns.gpus_per_engine) == (AffineCost(1.0), 2)
    assert (split.train_time_per_token, split.train_time_per_step) == (3.0, 0.0)
    assert (turns.train_time_per_token, turns.train_time_per_step) == (1.0, 7.0)
    assert (split.transfer, split.preprocess, turns.transfer, turns.preprocess) == (0.0, 6.0, 5.0, 0.0)
    path.write_text(dump_toml(scenario))
    assert load_scenario(path) == scenario


def test_estimates_per_schedule() -> None:
    turns = load_scenario(PAPER, ["schedule.type=conventional", "schedule.steps_per_rl_step=133"])
    written = estimate_scenario(turns)
    assert written is not None
    assert written.rate == pytest.approx(10.744, rel=1e-4)
    behind = load_scenario(PAPER, ["schedule.type=one_step_off"])
    assert estimate_scenario(behind) == one_step_off(build_workload(behind, colocated=False), 1, 44)
    assert estimate_scenario(load_scenario(PAPER, ["schedule.type=april"])) is None
    assert estimate_scenario(load_scenario(PAPER, ["schedule.max_lag=9"])) is None


def test_plan_notes_effects_missing_in_formulas() -> None:
    scenario = load_scenario(PAPER, ["batch.group_size=8", "failures.mean_time_between=1e6"])
    notes = plan_scenario(scenario, Goal(max_lag=20), "corrected").notes
    assert len(notes) == 2
    assert "the slowest of their group of 8" in notes[0]
    assert "failures of engines" in notes[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode.type=table", "decode.sizes=[]", "decode.rates=[]"], "decode.sizes: the table is empty"),
        (["decode.type=table", "decode.sizes=[1,2]", "decode.rates=[2,1]"], "decode.rates: should not decrease"),
        (
            ["decode.type=table", "decode.sizes=[2,1]", "decode.rates=[1,2]"],
            "decode.sizes: should increase, but 1",
        ),
        (["decode.type=affine", "decode.base=0"], "decode.base and per_sequence are both 0"),
        ([*TABLE, "schedule.num_in_flight=65"], "num_in_flight = 65 is beyond the table, whose sizes end at 64"),
        ([*TABLE, "--max-in-flight", "65"], "max_in_flight = 65: should be at least 1, at most 64"),
        (["--max-in-flight", "0"], "max_in_flight = 0: should be at least 1"),
        (["cluster.num_engines=128"], "cluster.num_engines = 128: with 128 GPUs and 1 per engine, use 1 to 127"),
        (["cluster.num_gpus=1"], "cluster.num_gpus = 1: too few for an engine of 1 and a trainer; use at least 2"),
        (["batch.group_size=3"], "batch: batch_size = 128 is not a multiple of group_size = 3"),
        (["batch.filter_rate=0.5"], "batch.filter_rate = 0.5: the formulas do not model dynamic sampling"),
        (["schedule.queue_capacity=64"], "schedule.queue_capacity = 64 is less than batch.batch_size = 128"),
        (["--max-lag", "0"], "max_lag = 0: no split has less than 1"),
        (["--rate", "25"], "rate = 25: no split is faster than 19.4"),
        (["cluster.num_gpus=0"], "cluster.num_gpus: should be greater than or equal to 1, got 0"),
        (["batch.batch_size=0"], "batch.batch_size: should be greater than or equal to 1, got 0"),
        (["schedule.num_in_flight=0"], "schedule.num_in_flight: should be greater than or equal to 1, got 0"),
        (
            ["schedule.type=conventional", "schedule.steps_per_rl_step=0"],
            "schedule.steps_per_rl_step: should be greater",
        ),
        (["delays.handover_pause=-0.5"], "delays.handover_pause: should be greater than or equal to 0, got -0.5"),
        ([*TABLE, "decode.gpus_per_engine=0"], "decode.gpus_per_engine: should be greater than or equal to 1, got 0"),
        ([*TABLE, "decode.pad_to=0"], "decode.pad_to: should be greater than or equal to 1, got 0"),
        (["decode.type=affine", "decode.base=1", "decode.per_token=-1"], "decode.per_token: should be greater than"),
        (["lengths.max=0"], "lengths.max: should be greater than or equal to 1, got 0"),
        ([*TWO_POINT, "lengths.long_share=1.5"], "lengths.long_share: should be less than or equal to 1, got 1.5"),
        ([*LOGNORMAL, "lengths.sigma=0"], "lengths: sigma and group_sigma are both 0; type = 'constant' would work"),
        (["delays.transfer=-1"], "delays.transfer: should be greater than or equal to 0, got -1"),
        (["training.time_per_token=-1"], "training.time_per_token: should be greater than or equal to 0, got -1"),
        (["lengths.type=constant", "lengths.length=0"], "lengths.length: should be greater than or equal to 1, got 0"),
        (["lengths.type=list", "lengths.lengths=[3]", "lengths.counts=[0]"], "lengths: counts are all 0"),
        (
            ["lengths.type=list", "lengths.file=/nowhere.json"],
            "lengths: cannot read the file /nowhere.json: [Errno 2] No such",
        ),
        (["lengths.type=list"], "lengths.lengths is missing"),
    ],
)
def test_wrong_scenario_is_one_clear_line(arguments: list[str], message: str, refused: Refused) -> None:
    assert refused("plan", PAPER, *arguments).startswith(f"midflight: {message}")
