"""A run with a damaged newest checkpoint resumes from the checkpoint before it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES

pytestmark = pytest.mark.slow

RECIPE = SHIPPED_RECIPES["cpu_demo"]
SMALL = ("batch.batch_size=16", "batch.group_size=4", "schedule.num_in_flight=16", "eval.num_problems=0")


def train(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "midflight", "train", *map(str, arguments), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_torn_checkpoint_is_reported_and_skipped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = train(RECIPE, f"run.directory={run}", "trainer.max_steps=6", "trainer.checkpoint_every=3", *SMALL)
    assert started.returncode == 0, started.stderr
    weights = run / "checkpoints" / "step_6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    resumed = train(run, "--resume", "trainer.max_steps=8")
    assert resumed.returncode == 0, resumed.stderr
    assert "step_6 is damaged and not used, as model.safetensors is not what was written" in resumed.stderr
    assert "training resumes from step_3" in resumed.stderr
    summary = json.loads(resumed.stdout)
    groups = summary["groups"]
    assert (summary["steps"], groups["trained"]) == (8, 8 * 4)
    assert groups["started"] == sum(groups[key] for key in ("trained", "dropped", "failed", "unfinished"))
    versions = [json.loads(line)["version"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert versions == list(range(1, 9))

    for checkpoint in (run / "checkpoints").glob("step_*"):
        (checkpoint / "config.json").write_text("{}")
    hopeless = train(run, "--resume", "trainer.max_steps=9")
    assert hopeless.returncode == 1
    assert "are damaged; in step_8, the newest, config.json is not what was written" in hopeless.stderr.splitlines()[-1]
