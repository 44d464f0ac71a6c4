"""Command `midflight simulate`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.cli import main
from refusals import Refused

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "scenarios" / "paper.toml"
SMALL = ["lengths.max=64", "batch.batch_size=32", "simulation.num_steps=60", "simulation.num_warm_up_steps=20"]
# An optimizer step takes many decode steps, as the formulas assume.
FLUID = [*SMALL, "batch.batch_size=1024", "cluster.num_engines=36"]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "midflight", "simulate", str(PAPER), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_table_compares_simulation_and_formulas() -> None:
    said = simulate(*FLUID)
    assert said.returncode == 0, said.stderr
    rows = {line[:43].strip(): line[43:].split() for line in said.stdout.splitlines()}
    simulated, formulas = map(float, rows["trained tokens per flash"])
    assert simulated == pytest.approx(formulas, rel=0.05)
    assert "over 40 optimizer steps" in said.stdout


def test_json_and_plot(tmp_path: Path) -> None:
    plot = tmp_path / "lag.png"
    said = simulate(*SMALL, "--json", "--plot", str(plot))
    assert said.returncode == 0, said.stderr
    result = json.loads(said.stdout)
    assert len(result["batches"]) == 40
    assert result["figures"]["lag/max"] == max(batch["lag/max"] for batch in result["batches"])
    assert result["formulas"]["throughput/trained_tokens"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_rollouts_follow_a_trace_computed_by_hand(tmp_path: Path) -> None:
    """Four slots, batches of four, training of five ticks: rollouts are trained in the order of completion."""
    scenario = tmp_path / "trace.toml"
    scenario.write_text(
        "[cluster]\nnum_gpus = 2\nnum_engines = 1\n[batch]\nbatch_size = 4\n"
        '[lengths]\ntype = "list"\nlengths = [2, 7, 3, 5, 4, 6, 1, 8]\norder = "cycled"\n'
        '[schedule]\nnum_in_flight = 4\nqueue_capacity = 1000\n[decode]\ntype = "affine"\nbase = 1\n'
        "[training]\ntime_per_token = 0\ntime_per_step = 5\n[simulation]\nnum_steps = 3\nnum_warm_up_steps = 0\n"
    )
    command = [sys.executable, "-m", "midflight", "simulate", str(scenario), "--json", "--rollouts"]
    batches = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["batches"]
    assert [batch["start"] for batch in batches] == [6, 11, 16]
    assert [batch["rollouts"] for batch in batches] == [[0, 2, 3, 4], [6, 1, 8, 5], [10, 7, 9, 11]]
    assert [batch["last_lags"] for batch in batches] == [[0] * 4, [1] * 4, [2, 1, 1, 1]]


@pytest.mark.parametrize(
    "schedule",
    [
        ["schedule.type=conventional", "schedule.steps_per_rl_step=7"],
        ["schedule.type=april", "batch.group_size=4", "batch.filter_rate=0.25", "schedule.refill=over_sampled"],
        ["schedule.type=bounded", "schedule.max_lag=3", "failures.mean_time_between=1e5", "failures.repair_time=1e3"],
        ["schedule.type=one_step_off"],
        ["schedule.max_lag=5", "schedule.when_full=drop_oldest"],
    ],
    ids=lambda schedule: schedule[0],
)
def test_every_schedule_can_be_simulated(
    schedule: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["midflight", "simulate", str(PAPER), *SMALL, *schedule, "--json"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    # 60 - 20 steps; with G = 7 whole RL steps only: 63 - 21.
    assert figures["steps"] == (42 if "conventional" in schedule[0] else 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode.type=table", "decode.sizes=[]", "decode.rates=[]"], "decode.sizes: the table is empty"),
        (["decode.type=table", "decode.sizes=[64,128]", "decode.rates=[2,1]"], "decode.rates: should not decrease"),
        (
            ["decode.type=table", "decode.sizes=[64]", "decode.rates=[0.1]"],
            "schedule.num_in_flight = 192 is beyond decode.sizes, which end at 64",
        ),
        (["cluster.num_engines=200"], "cluster.num_engines = 200: with 128 GPUs and 1 per engine, use 1 to 127"),
        (["schedule.queue_capacity=100"], "schedule.queue_capacity = 100 is less than batch.batch_size = 128"),
        (["schedule.max_lag=-1"], "schedule.max_lag: should be greater than or equal to 0, got -1"),
        (["batch.group_size=5"], "batch: batch_size = 128 is not a multiple of group_size = 5"),
        (["batch.filter_rate=1"], "batch.filter_rate: should be less than 1, got 1"),
        (["delays.update_pause=-2"], "delays.update_pause: should be greater than or equal to 0, got -2"),
        (["failures.mean_time_between=0"], "failures.mean_time_between: should be greater than 0, got 0"),
        (["simulation.num_steps=10"], "simulation: num_warm_up_steps = 200 leaves none of num_steps = 10"),
        (["schedule.type=april", "schedule.refill=over_sampled", "schedule.num_in_flight=9"], "schedule: refill = "),
        (["schedule.type=magic"], "schedule.type: there is no 'magic'"),
        (["lengths.type=run", "lengths.directory=nowhere"], "lengths.directory: "),
        (["--plot", "/nowhere/lag.png"], "cannot write /nowhere/lag.png: there is no directory /nowhere"),
    ],
)
def test_an_invalid_scenario_is_a_one_line_error(arguments: list[str], message: str, refused: Refused) -> None:
    assert refused("simulate", PAPER, *arguments).startswith(f"midflight: {message}")


def test_a_pipeline_needs_num_engines(tmp_path: Path) -> None:
    scenario = tmp_path / "no_split.toml"
    scenario.write_text("[cluster]\nnum_gpus = 8\n")
    command = [sys.executable, "-m", "midflight", "simulate", str(scenario)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 2
    assert said.stderr.startswith("midflight: cluster.num_engines is missing: schedule.type = 'pipeline'")


def test_simulating_imports_no_torch() -> None:
    program = (
        "import sys\nfrom midflight.cli import app\n"
        f"sys.argv = ['midflight', 'simulate', {str(PAPER)!r}, *{SMALL!r}]\n"
        "app(standalone_mode=False)\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
