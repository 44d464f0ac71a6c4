"""Command `python -m benchmarks gpu`: no check stops another one, and a rehearsal on the CPU passes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.environment import make_environment, requirements
from benchmarks.gpu.registry import CHECKS, Check
from benchmarks.gpu.report import table, targets, write_results
from benchmarks.gpu.runner import run_checks
from benchmarks.gpu.setting import Setting

ROOT = Path(__file__).parents[3]


def outcome(check: str, status: str = "passed", reason: str = "", rows: Any = ()) -> dict[str, Any]:
    return {"check": check, "status": status, "seconds": 1.0, "reason": reason, "rows": list(rows)}


@pytest.mark.slow
def test_every_check_exists() -> None:
    for check in CHECKS:
        module, _, name = check.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_results_have_targets_and_a_table_that_fits_a_terminal(tmp_path: Path) -> None:
    decode = {"model": "llama_1b_shape", "sequences": 8, "midflight": 900.0}
    decode |= {"over_transformers": 3.0, "of_roofline": 0.5}
    update = {
        "model": "smollm2_shape",
        "median_decode_step_ms": 3.0,
        "longest_delay_steps": {"median": 2.0, "max": 3.0},
    }
    outcomes = [
        outcome("fused_decoder", "failed", "Traceback\n" + "x " * 90),
        outcome("decode_llama_1b_shape", rows=[decode]),
        outcome("updates_smollm2_shape", rows=[update]),
    ]
    holds = {target["name"]: target["holds"] for target in targets(outcomes)}
    assert holds == {
        "checks that did not pass": False,
        "decode_llama_1b_shape: least ratio to transformers' generate": True,
        "updates_smollm2_shape: median longest delay (decode steps)": False,
    }
    write_results(tmp_path, {"gpu": "none"}, CHECKS, outcomes)
    assert json.loads((tmp_path / "gpu_decode.json").read_text())["rows"] == [decode]
    assert json.loads((tmp_path / "gpu_checks.json").read_text())["rows"][0]["status"] == "failed"
    lines = table({"gpu": "none"}, outcomes).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("50% of the roofline, 3.0 x transformers" in line for line in lines)


def test_environment_needs_torch_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.environment._THERE_ALREADY", ("no_such_package",))
    with pytest.raises(SystemExit, match="has no no_such_package; name a Python that has it"):
        make_environment(tmp_path / "venv", None)


def test_wheels_exclude_large_packages() -> None:
    names = " ".join(requirements())
    assert "pydantic" in names
    assert "torch" not in names
    assert "transformers" not in names


@pytest.mark.slow
def test_no_check_stops_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]))
    names = ("raises", "dies", "passes", "hangs", "is_skipped")
    checks = [Check(name, f"unit.benchmarks.gpu_checks:{name}", 2.0, "fakes") for name in names]
    setting = Setting("cpu", True, str(tmp_path))
    outcomes = {each["check"]: each for each in run_checks(checks, setting, 120.0, lambda text: None)}
    assert {name: each["status"] for name, each in outcomes.items()} == {
        "raises": "failed",
        "dies": "failed",
        "passes": "passed",
        "hangs": "failed",
        "is_skipped": "skipped",
    }
    assert outcomes["raises"]["reason"].endswith("AssertionError: token 3 differs")
    assert "ended with code 3" in outcomes["dies"]["reason"]
    assert outcomes["passes"]["rows"] == [{"device": "cpu"}]
    assert "last words" in outcomes["hangs"]["reason"]
    assert "gpu_checks.py" in outcomes["hangs"]["reason"]  # the stack of the check that hangs
    late = list(run_checks(checks, setting, 1.0, lambda text: None))
    assert [each["reason"] for each in late] == ["the time of 1 s was up"] * len(checks)


def rehearse(out: Path, only: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--small", "--out", str(out)]
    done = subprocess.run([*command, "--only", only], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    result: dict[str, Any] = json.loads((out / "gpu_checks.json").read_text())
    return result


@pytest.mark.slow
def test_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    result = rehearse(tmp_path, "fused_decoder_with_graphs,update_in_flight,trainer_to_engine,train_smollm2_shape")
    assert [row["status"] for row in result["rows"]] == ["passed"] * 4
    assert json.loads((tmp_path / "gpu_train.json").read_text())["rows"][0]["gemm_fraction"] > 0


@pytest.mark.benchmarks
def test_whole_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    result = rehearse(tmp_path, "")
    assert {row["status"] for row in result["rows"]} == {"passed", "skipped"}
