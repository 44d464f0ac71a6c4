"""Command `midflight calibrate`, with short real runs; the simulator and the planner accept its scenario."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from midflight.config import SHIPPED_RECIPES, dump_toml, load_recipe, load_scenario
from midflight.config.scenario import TableDecodeConfig
from midflight.launch.scenarios import build_lengths
from midflight.launch.simulation import simulate_scenario
from narrowing import instance

RECIPE = SHIPPED_RECIPES["cpu_demo"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_calibrated_scenario_can_be_simulated_and_validated(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, runs, plot = tmp_path / "measured.toml", tmp_path / "runs", tmp_path / "rates.png"
    recipe = tmp_path / "recipe.toml"
    # On a busy machine, two threads that wait for each other can be a hundred times slower than one.
    recipe.write_text(dump_toml(load_recipe(RECIPE, ["engine.threads=1", "trainer.threads=1"])))
    figures = _json("calibrate", recipe, "--out", out, "--out-runs", runs, "--plot", plot, "--seconds", 4)
    assert plot.read_bytes().startswith(b"\x89PNG")
    scenario = load_scenario(out)
    assert scenario.schedule == load_recipe(recipe).schedule
    assert scenario.batch.model_dump() == figures["batch"]
    assert scenario.training.model_dump() == figures["training"]
    assert {run["name"] for run in figures["runs"]} <= {path.name for path in runs.iterdir()}
    assert instance(scenario.decode, TableDecodeConfig).sizes[-1] >= 64
    assert instance(scenario.colocated_decode, TableDecodeConfig).gpus_per_engine == scenario.cluster.num_gpus
    assert build_lengths(scenario.lengths).distribution.mean == pytest.approx(figures["lengths"]["mean"])
    assert simulate_scenario(scenario).rate > 0
    assert _json("plan", out)

    result = _json("plan", out, "--validate", recipe, "--schedules", "pipeline,conventional", "--seconds", 4)
    assert [row["schedule"] for row in result["rows"]] == ["pipeline", "conventional"]
    for row in result["rows"]:
        assert row["measured"]["trained_tokens_per_s"] > 0
        assert row["predicted"]["trained_tokens_per_s"] > 0
    conventional = result["rows"][1]
    assert conventional["error"].items() >= {"mean_lag": 0.0, "max_lag": 0.0}.items(), "both are on-policy"


def _json(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "midflight", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result
