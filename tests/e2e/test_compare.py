"""Command `midflight compare`, with short real runs: evaluated checkpoints and output files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES

RECIPE = SHIPPED_RECIPES["cpu_demo"]
SCHEDULES = ["pipeline", "april:over_sampling=1.5"]


@pytest.mark.slow
def test_compare_two_schedules(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    options = ["--schedules", ",".join(SCHEDULES), "--steps", "12", "--accuracy-every", "6", "--out", str(out)]
    overrides = ["batch.batch_size=16", "eval.num_problems=32"]
    command = [sys.executable, "-m", "midflight", "compare", str(RECIPE), *overrides, *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((out / "compare.json").read_text())
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (result["seconds"], result["steps"]) == (None, 12)
    assert (result["seeds"], result["overrides"]) == ([0], overrides)
    assert [row["schedule"] for row in result["rows"]] == [run["schedule"] for run in result["runs"]] == SCHEDULES
    for row, run in zip(result["rows"], result["runs"], strict=True):
        assert run.items() >= row.items(), "with one seed, the row equals the run"
        assert run["samples"] == 16 * run["steps"] == 16 * 12
        assert 0 <= run["final_accuracy"] <= 1
        groups = row["groups"]
        assert groups["started"] == sum(groups[key] for key in ("trained", "dropped", "failed", "unfinished"))
        assert groups["trained"] == 2 * row["steps"]
        assert row["trained_tokens_per_rollout_s"] > 0
        assert row["trained_tokens_per_s"] > row["trained_samples_per_s"] > 0
        assert row["seconds_to_accuracy"].keys() == {"0.8", "0.85", "0.9"}
        assert run["curve"][-1]["samples"] == run["samples"]
        (checkpoint,) = (out / run["run_directory"] / "checkpoints").iterdir()
        assert checkpoint.name == f"step_{run['steps']}"
    assert "held-out accuracy" in done.stderr
