"""Runs that end with a killed process and are resumed: no group is lost or trained on twice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from faults.runs import (
    BATCH_SIZE,
    GROUP_SIZE,
    RECIPE,
    SCHEDULES,
    SETTINGS,
    TIMEOUT_S,
    batches_of,
    check_accounts,
    check_saved_rollouts_continued,
    is_running,
    long_sums,
    num_lines,
    pid_of,
    resume,
    saved_partials,
    training,
    wait_for,
    waiting_of,
)
from midflight.config.run_directory import RunDirectory

pytestmark = pytest.mark.slow

ENDS = ("supervisor.max_restarts=0",)  # a killed process ends the run


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_groups_waiting_for_killed_preprocessing_are_trained_later(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    settings = (*SETTINGS, *ENDS, "schedule.type=bounded", "schedule.max_lag=2", "preprocess.num_workers=1")
    with training(RECIPE, f"run.directory={run.path}", *settings) as process:
        wait_for(process, lambda: num_lines(run) >= 4)
        pid = pid_of("preprocess", process.pid)
        os.kill(pid, signal.SIGSTOP)
        wait_for(process, lambda: len(waiting_of(run)) >= 2)
        os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert "the preprocess process was killed by signal 9" in stderr
    waiting = waiting_of(run)
    interrupted = json.loads(run.summary.read_text())
    check_accounts(run, interrupted)
    assert interrupted["groups"]["unfinished"] >= len(waiting) * BATCH_SIZE // GROUP_SIZE
    summary, _ = resume(run, max(waiting) + 3)
    check_accounts(run, summary)
    batches = batches_of(run)
    for index, chosen in waiting.items():
        assert batches[index].group_ids == [group.group_id for group in chosen.groups]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["LongSums", pytest.param("LongTurns", marks=pytest.mark.faults)])
def test_tokens_of_a_killed_rollout_process_are_kept(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = long_sums(tmp_path, monkeypatch, kind)
    run = RunDirectory(tmp_path / "run")
    with training(RECIPE, f"run.directory={run.path}", *SETTINGS, *ENDS, *task, "schedule.num_in_flight=32") as process:
        wait_for(process, lambda: num_lines(run) >= 4 and len(saved_partials(run)) >= 8)
        os.kill(pid_of("rollout", process.pid), signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
    saved = saved_partials(run)
    assert saved, "rollouts were in flight, and none was saved"
    assert any(len(rollout.turns) > 1 for rollout in saved) == (kind == "LongTurns")
    for rollout in saved:
        assert len(rollout.generated.weight_versions) == len(rollout.generated.logprobs) == len(rollout.generated)
        assert rollout.generated.weight_versions.min() >= 0
    num_before = len(batches_of(run)) and max(batches_of(run)) + 1
    summary, _ = resume(run, num_lines(run) + 12)
    check_accounts(run, summary)
    later = {offset: batch for offset, batch in batches_of(run).items() if offset >= num_before}
    check_saved_rollouts_continued(saved, later)
    continued = {rollout.group_id for rollout in saved}
    carrying = [batch for batch in later.values() if continued & set(batch.group_ids)]
    assert all(batch.metrics["carried_token_fraction"] > 0 for batch in carrying)


def shared_weights() -> set[Path]:
    return set(Path("/dev/shm").glob("midflight-*"))


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_orphaned_workers_clean_up_before_a_resumed_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with training(RECIPE, f"run.directory={run.path}", *SETTINGS, *SCHEDULES[0]) as process:
        wait_for(process, lambda: num_lines(run) >= 2)
        pids = {role: pid_of(role, process.pid) for role in ("trainer", "rollout", "grader")}
        weights = {each for each in shared_weights() if is_mapped(each, pids["trainer"])}
        assert len(weights) == 1
        # A stopped rollout process cannot notice that its supervisor is gone.
        os.kill(pids["rollout"], signal.SIGSTOP)
        process.kill()
        process.wait()
    with training(run.path, "--resume", f"trainer.max_steps={num_lines(run) + 12}", "--json") as process:
        assert process.stderr
        assert "waiting for the processes of an earlier run" in process.stderr.readline()
        assert is_running(pids["rollout"])
        os.kill(pids["rollout"], signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, stderr
    assert not any(is_running(pid) for pid in pids.values())
    assert not weights & shared_weights()
    check_accounts(run, json.loads(stdout))


def is_mapped(directory: Path, pid: int) -> bool:
    return str(directory) in Path(f"/proc/{pid}/maps").read_text()
