"""Command `midflight train` with a trainer of two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from midflight.config import SHIPPED_RECIPES
from midflight.metrics.jsonl import read_metrics
from midflight.trainer.checkpoints import load_state, newest_checkpoint

pytestmark = pytest.mark.slow

RECIPE = SHIPPED_RECIPES["cpu_demo"]
SETTINGS = (
    "trainer.type=fsdp",
    "trainer.num_ranks=2",
    "trainer.threads=1",
    "engine.threads=1",
    "batch.batch_size=16",
    "schedule.num_in_flight=16",
    "eval.num_problems=0",
)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "midflight", "train", *map(str, arguments)]


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str], newer_than: int) -> int:
    """Wait for a checkpoint newer than `newer_than` and return its version."""
    while True:
        newest = newest_checkpoint(run / "checkpoints")
        if newest is not None and (version := int(newest.name.removeprefix("step_"))) > newer_than:
            return version
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        pytest.fail(f"the run ended early: {process.communicate()[1]}")


def pids_of_log(log: Path) -> list[int]:
    """Return the processes that have the log open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(descriptor.resolve() == log for descriptor in (process / "fd").iterdir()):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_two_ranks_save_a_model_and_report_peak_memory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = command(RECIPE, f"run.directory={run}", "trainer.max_steps=4", *SETTINGS, "--json")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 4
    assert len(summary["peak_memory_bytes"]) == 2
    assert [line["version"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert {path.name for path in (run / "logs").glob("*.log")} == {"trainer.log", "trainer-1.log", "rollout.log"}
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step_4")
    start = AutoModelForCausalLM.from_pretrained(RECIPE.parent / "models" / "chain_sums")
    for (name, trained), (_, before) in zip(model.named_parameters(), start.named_parameters(), strict=True):
        assert trained.isfinite().all()
        assert not torch.equal(trained, before), name


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_killed_rank_restarts_and_one_process_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = ("trainer.max_steps=100000", "trainer.checkpoint_every=2", f"run.directory={run}")
    arguments = command(RECIPE, *endless, *SETTINGS)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        before = wait_for_checkpoint(run, process, newer_than=0)
        (pid,) = pids_of_log(run / "logs" / "trainer-1.log")
        os.kill(pid, signal.SIGKILL)
        wait_for_checkpoint(run, process, newer_than=before + 2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert json.loads((run / "summary.json").read_text())["restarts"] == {"trainer": 1}
    newest = newest_checkpoint(run / "checkpoints")
    assert newest is not None
    last = load_state(newest).version
    one = ("trainer.type=single", f"trainer.max_steps={last + 2}")
    done = subprocess.run(command(run, "--resume", *one, "--json"), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == last + 2
