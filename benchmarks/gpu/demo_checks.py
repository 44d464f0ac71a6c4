"""The demo with its engine and its trainer on the device: two processes that share it, as a user starts them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.setting import Row, Setting
from midflight.config import SHIPPED_RECIPES
from midflight.metrics.jsonl import read_metrics

_STEPS, _SMALL_STEPS = 120, 8
_LOG_LINES = 12


def demo_learns(setting: Setting) -> list[Row]:
    """Run the demo's recipe. Its reward rises, and the engine samples with the newest weights."""
    run, steps = setting.scratch_path / "demo", _SMALL_STEPS if setting.small else _STEPS
    overrides = [
        f"run.directory={run}",
        f"engine.device={setting.device}",
        f"trainer.device={setting.device}",
        f"trainer.max_steps={steps}",
        "supervisor.max_restarts=0",
        "eval.num_problems=64",
    ]
    if setting.small:
        overrides += ["batch.batch_size=16", "schedule.num_in_flight=16", "engine.threads=1", "trainer.threads=1"]
    command = [sys.executable, "-m", "midflight", "train", str(SHIPPED_RECIPES["cpu_demo"]), *overrides, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 0, f"rc {done.returncode}: {done.stderr[-600:]}\n{_logs(run)}"
    summary = json.loads(done.stdout)
    lines = read_metrics(run / "metrics.jsonl")
    rewards = [line["reward/mean"] for line in lines]
    tenth = max(1, len(rewards) // 10)
    first, last = statistics.mean(rewards[:tenth]), statistics.mean(rewards[-tenth:])
    assert len(lines) == steps, f"{len(lines)} of {steps} optimizer steps"
    assert all(abs(line["kl/behavior"]) < 0.05 for line in lines), "engine and trainer disagree about log-probabilities"
    if not setting.small:
        assert last > first + 0.1, f"the reward went from {first:.3f} to {last:.3f}"
    throughput = ("throughput/generated_tokens_per_s", "throughput/trained_tokens_per_s")
    keys = ("time/step_s", *throughput, "lag/mean", "lag/max")
    medians = {key: statistics.median(line[key] for line in lines[tenth:]) for key in keys if key in lines[-1]}
    return [{"optimizer_steps": steps, "first_reward": first, "last_reward": last, **medians, "summary": summary}]


def _logs(run: Path) -> str:
    """End of each process's log."""
    logs = sorted((run / "logs").glob("*.log")) if (run / "logs").is_dir() else []
    ends = (f"{log.name}:\n" + "\n".join(log.read_text().strip().splitlines()[-_LOG_LINES:]) for log in logs)
    return "\n".join(ends)
