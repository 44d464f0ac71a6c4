"""Command `python -m benchmarks train`, with a small load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import train_steps
from benchmarks.models import find_model
from benchmarks.train import TrainOptions, bench_train
from benchmarks.train_load import load_shape

from midflight.errors import BenchmarkError

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks", "train"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_train_benchmark_measures_both_steps(dtype: str) -> None:
    small = ["--sequences", "4", "--group-size", "2", "--rounds", "2", "--json", "--dtype", dtype]
    done = subprocess.run([*COMMAND, *small], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (row,) = result["rows"]
    assert (row["model"], row["dtype"]) == ("demo", dtype)
    assert row["packed"] > 0
    assert row["padded"] > 0
    assert row["packed_over_padded"] > 0
    assert 0 < row["gemm_fraction"] < 1
    assert 0 < row["padded_gemm_fraction"] < 1
    assert 0 < row["padding_fraction"] < 1
    assert [entry["round"] for entry in result["rounds"]] == [0, 1]
    assert {entry["first"] for entry in result["rounds"]} == {"packed", "padded"}
    assert result["gemm_rate"] > 0
    assert result["machine"]["cores"] >= 1
    # Two prompts of 12 tokens are packed once instead of twice.
    assert result["work"]["packed_tokens"] == result["work"]["tokens"] - 2 * 12


def test_an_unknown_dtype_is_refused() -> None:
    done = subprocess.run(
        [*COMMAND, "--dtype", "int4"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    assert "--dtype: 'int4' is not float32 or bfloat16" in done.stderr


def test_steps_with_different_results_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # On-policy ratios are 1, so only the padded step truncates all of them.
    monkeypatch.setattr(train_steps, "_MAX_RATIO", 0.5)
    options = TrainOptions(load_shape("demo", sequences=4, group_size=2), rounds=1)
    with pytest.raises(BenchmarkError, match="not the same"):
        bench_train(find_model("demo"), options, lambda line: None)
