"""Command `midflight plan`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "scenarios" / "paper.toml"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "midflight", *arguments], capture_output=True, text=True, timeout=120)


def test_plan_prints_a_table() -> None:
    done = run("plan", str(PAPER), "--lag", "paper", "--max-lag", "132")
    assert done.returncode == 0, done.stderr
    rows = {line[:14].strip(): line[14:].split() for line in done.stdout.splitlines() if line[:14].strip()}
    assert rows["best"] == ["44", "192", "84", "16.9", "132", "44.99", "99%", "10.74", "1.573"]
    assert rows["as written"] == rows["largest gain"] == rows["best"]
    assert "the pipeline is faster than conventional RL from a max lag of 14 on (13.1 by the formula" in done.stdout
    assert "note: the trainer is busy 99% of the time" in done.stdout


@pytest.mark.slow
def test_plan_writes_json_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plan.png"
    done = run("plan", str(PAPER), "cluster.num_gpus=64", "cluster.num_engines=20", "--json", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["as_written"]["rate"] == pytest.approx(7.684, rel=1e-4)
    assert plan["as_written"]["num_training_gpus"] == 44
    assert plan["as_written"]["conventional"]["max_lag"] == plan["as_written"]["max_lag"] == 61
    assert plan["best"]["rate"] == pytest.approx(max(plan["curve"]["rate"]), rel=1e-12)
    assert plan["front"] == sorted(plan["front"], key=lambda row: row["max_lag"])
    assert plan["one_step_off"]["max_lag"] <= plan["best"]["max_lag"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_unknown_values_are_null(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(
        '[cluster]\nnum_gpus = 4\n[batch]\nbatch_size = 8\n[decode]\ntype = "table"\nsizes = [1, 16]\n'
        "rates = [1.0, 8.0]\n[training]\ntime_per_token = 0.0\n"
    )
    done = run("plan", str(scenario), "--json")
    assert done.returncode == 0, done.stderr
    assert "NaN" not in done.stdout
    assert "Infinity" not in done.stdout
    plan = json.loads(done.stdout)
    assert plan["crossover"] is None
    assert plan["best"]["training_rate"] is None
    assert plan["as_written"] is None


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from midflight.cli import main; sys.argv = ['midflight', 'plan', sys.argv[1], '--json']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'midflight.sim.planner.plan'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(PAPER)], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["first_win"] == 15
    assert done.stderr == "['midflight.sim.planner.plan']\n"


def test_keys_of_scenarios_are_listed() -> None:
    done = run("config", "keys", "--scenario")
    assert done.returncode == 0, done.stderr
    assert "cluster.num_engines  (int | None, default unset)" in done.stdout
    assert "trainer." not in done.stdout
    assert "trainer.learning_rate" in run("config", "keys").stdout
