"""Evaluations before and after training in a process of their own: the supervisor stays small, kills, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.runs import RECIPE, SETTINGS, TIMEOUT_S, find, is_running, pid_of, training, wait_for
from midflight.config.run_directory import RunDirectory
from midflight.metrics.evaluations import read_evaluations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WITHOUT = tuple(item for item in SETTINGS if not item.startswith("eval."))
SHORT = (*WITHOUT, "eval.num_problems=16")
LONG = (*WITHOUT, "eval.num_problems=20000")  # more problems than are answered before a signal arrives

WATCHED = """
import sys
from pathlib import Path
from midflight.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        status = Path("/proc/self/status").read_text()
        peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        print("peak KiB", peak, *({"torch", "transformers"} & sys.modules.keys()), file=sys.stderr)
"""


@pytest.fixture
def watched(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts a training whose process reports its memory and the large modules it imported."""
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)

    def start(*arguments: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), "train", *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    return start


def is_evaluating(process: subprocess.Popen[str]) -> Callable[[], bool]:
    return lambda: find("evaluation", process.pid) is not None


def end_small(process: subprocess.Popen[str]) -> list[str]:
    """Wait for the end of a process; check that it was small and imported no torch. Return its other lines."""
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    *lines, last = stderr.splitlines()
    _, _, peak, *imported = last.split()
    assert imported == []
    assert int(peak) < 100 << 10
    return lines


def test_the_supervisor_stays_small_and_restarts_a_killed_evaluation(
    tmp_path: Path, watched: Callable[..., subprocess.Popen[str]]
) -> None:
    run = RunDirectory(tmp_path / "run")
    with watched(RECIPE, f"run.directory={run.path}", *SHORT, "trainer.max_steps=2") as process:
        wait_for(process, is_evaluating(process))
        os.kill(pid_of("evaluation", process.pid), signal.SIGKILL)
        lines = end_small(process)
    assert lines[0] == "the evaluation process was killed by signal 9; restart in 0.5 s"
    with watched(run.path, "--resume", "trainer.max_steps=3") as process:
        end_small(process)
    summary = json.loads(run.summary.read_text())
    assert summary["restarts"] == {"evaluation": 1}
    assert summary["eval_before"]["num_problems"] == summary["eval_after"]["num_problems"] == 16
    assert [line["version"] for line in read_evaluations(run.evaluations)] == [0, 2, 3]
    with watched(RECIPE, "model.path=/nowhere") as process:
        assert end_small(process) == ["midflight: model.path: there is no directory /nowhere"]
    assert process.returncode == 2


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_evaluation_at_once(tmp_path: Path, number: signal.Signals) -> None:
    run = RunDirectory(tmp_path / "run")
    with training(RECIPE, f"run.directory={run.path}", *LONG) as process:
        wait_for(process, is_evaluating(process))
        pid = pid_of("evaluation", process.pid)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert stderr.splitlines() == [f"midflight: stopped; to resume: midflight train {run.path} --resume"]
    assert not is_running(pid)


@pytest.mark.faults
def test_an_evaluation_process_that_always_dies_ends_the_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with training(RECIPE, f"run.directory={run.path}", *LONG, "supervisor.max_restarts=0") as process:
        wait_for(process, is_evaluating(process))
        os.kill(pid_of("evaluation", process.pid), signal.SIGKILL)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    (line,) = stderr.splitlines()
    assert line.startswith("midflight: the evaluation process was killed by signal 9; its log is ")
    assert line.endswith(f"midflight train {run.path} --resume")


@pytest.mark.faults
def test_an_evaluation_process_ends_with_its_supervisor(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with training(RECIPE, f"run.directory={run.path}", *LONG) as process:
        wait_for(process, is_evaluating(process))
        pid = pid_of("evaluation", process.pid)
        process.kill()
    run.wait_for_workers(lambda _: None)
    assert not is_running(pid)
