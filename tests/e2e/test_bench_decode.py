"""Command `python -m benchmarks decode`, with a small load and without vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]

ROOT = Path(__file__).parents[2]


def test_decode_benchmark_measures_every_engine() -> None:
    command = [sys.executable, "-m", "benchmarks", "decode", "--json"]
    small = ["--sequences", "1,2", "--rounds", "1", "--new-tokens", "12", "--skip", "transformers_cb:2"]
    one_core = {min(os.sched_getaffinity(0))}  # the benchmark starts a thread per core, and other tests use them, too
    environment = {name: value for name, value in os.environ.items() if name != "MIDFLIGHT_VLLM_PYTHON"}
    done = subprocess.run(
        [*command, *small],
        cwd=ROOT,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, one_core),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["failures"] == []
    assert [(row["model"], row["dtype"], row["sequences"]) for row in result["rows"]] == [
        ("demo", "float32", 1),
        ("demo", "float32", 2),
    ]
    for row in result["rows"]:
        assert 0 < row["midflight"] < row["roofline"]
        assert row["transformers"] > 0
        assert row["vllm"] is None
        assert row["midflight_compute_dtype"] == "float32"
        assert row["midflight_over"]["transformers"] > 0
    assert result["rows"][0]["transformers_cb"] > 0
    assert result["rows"][1]["transformers_cb"] is None
    assert len(result["rounds"]) == 3 + 2
    assert result["machine"]["cores"] >= 1
