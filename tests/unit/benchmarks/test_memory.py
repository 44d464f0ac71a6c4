"""Memory of processes over time: samples of the kernel, steady state, shares, and the goals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.memory import DEMO, Measured, estimated_parts, memory_table, rows_of, tensor_targets
from benchmarks.watched_memory import Sample, Usage, WatchedMemory, shared_memory_mb, usage_by_role

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import BenchmarkError

ROLLUP = """\
55d0c0000000-7ffd00000000 ---p 00000000 00:00 0                          [rollup]
Rss:                5000 kB
Pss:                3000 kB
Pss_Anon:           1500 kB
Pss_Shmem:          1000 kB
Private_Clean:       200 kB
Private_Dirty:       800 kB
"""


def samples(*values: float, first: int = 1, shared: float = 0.0) -> list[Sample]:
    return [Sample(sweep, 7, value, value / 2, shared) for sweep, value in enumerate(values, first)]


def test_a_sample_leaves_shared_memory_out() -> None:
    sample = Sample.of(3, 7, ROLLUP)
    assert (sample.sweep, sample.pid) == (3, 7)
    assert sample.own_mb == pytest.approx(2.048)
    assert sample.private_mb == pytest.approx(1.024)
    assert sample.shared_memory_mb == pytest.approx(1.024)


def test_steady_state_is_of_the_second_half() -> None:
    assert Usage.of(samples(1, 9, 4, 5, 6)) == Usage(steady=5, peak=9, peak_private=4.5)


def test_processes_of_training_count_only_together() -> None:
    watched = {"trainer": samples(10, 20, 90), "rollout": samples(5, 6, first=1), "supervisor": samples(1, 1, 3)}
    usage = usage_by_role(watched, ("trainer", "rollout"))
    assert [usage[role].peak for role in watched] == [20, 6, 3]
    with pytest.raises(BenchmarkError, match="more steps would work"):
        usage_by_role({"trainer": samples(10)}, ("trainer", "rollout"))


def test_shared_memory_counts_once() -> None:
    watched = {"trainer": samples(1, 1, 1, shared=300), "rollout": samples(1, 1, first=2, shared=400)}
    assert shared_memory_mb(watched, ("trainer", "rollout")) == 700


def test_parts_add_up_to_the_measured_total() -> None:
    recipe = load_recipe(SHIPPED_RECIPES[DEMO])
    usage = {role: Usage(400.0, 500.0, 300.0) for role in ("supervisor", "grader", "trainer", "rollout", "evaluation")}
    demo = Measured(recipe, usage, 7.0)
    rows = list(rows_of(demo, demo))
    for role in ("trainer", "rollout", "evaluation"):
        own = {row["part"]: row["peak_mb"] for row in rows if row["process"] == role}
        assert own.pop("total") == pytest.approx(sum(own.values()))
        assert own["rest"] == pytest.approx(0, abs=1e-6)
    assert {row["part"] for row in rows if row["process"] == "trainer"} >= {"masters", "gradients", "optimizer"}
    assert estimated_parts(recipe)["trainer"]["masters"] == 4 * 597_120
    result = {"rows": rows, "targets": tensor_targets(recipe, rows)}
    assert "gradients" in memory_table(result)


def test_goals_leave_libraries_cache_and_activations_out() -> None:
    recipe = load_recipe(SHIPPED_RECIPES[DEMO])
    megabytes = 4 * 597_120 / 1e6
    peaks = {
        ("rollout", "total"): 30 + 20 + 3 * megabytes,
        ("rollout", "interpreter and libraries"): 30,
        ("rollout", "KV cache"): 20,
        ("rollout", "weights"): 2 * megabytes,
        ("trainer", "total"): 30 + 50 + 4 * megabytes,
        ("trainer", "interpreter and libraries"): 30,
        ("trainer", "activations"): 50,
        ("trainer", "masters"): 4 * megabytes,
    }
    rows = [{"process": process, "part": part, "peak_mb": mb} for (process, part), mb in peaks.items()]
    copies, trainer, error, _ = tensor_targets(recipe, rows)
    assert (copies["value"], copies["holds"]) == (pytest.approx(3), False)
    assert (trainer["value"], trainer["holds"]) == (pytest.approx(4 * megabytes), True)
    assert error["value"] == pytest.approx(0, abs=1e-9)


def test_this_process_and_its_child_are_watched(tmp_path: Path) -> None:
    waiting = [sys.executable, "-c", "import sys; print(); sys.stdin.read()"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        watched = WatchedMemory(os.getpid(), tmp_path)
        watched.sweep()
        child.kill()
    assert child.pid in {sample.pid for sample in watched.samples["other"]}
    (own,) = watched.samples["supervisor"]
    assert own.own_mb > 10


@pytest.mark.benchmarks
def test_the_benchmark_measures_every_process() -> None:
    command = [sys.executable, "-m", "benchmarks", "memory", "--recipes", "", "--steps", "20", "--num-problems", "8"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    processes = {row["process"] for row in result["rows"]}
    assert processes >= {"supervisor", "fork server", "trainer", "rollout", "evaluation", "grader"}
    assert all(target["holds"] for target in result["targets"])
