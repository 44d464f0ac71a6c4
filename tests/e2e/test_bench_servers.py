"""Commands `python -m benchmarks http`, `control` and `updates`, with small loads."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]


def bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_server_is_measured_beside_the_engine() -> None:
    load = ("--sequences", "4", "--lengths", "64,7", "--waiting", "20", "--seconds", "0.5", "--rounds", "1")
    result = bench("http", *load)
    *rows, beside = result["rows"]
    assert [(row["new_tokens"], row.get("waiting")) for row in rows] == [(64, None), (7, None), (64, 0), (64, 20)]
    assert all(row["http_tokens_per_s"] > 0 for row in rows)
    assert beside["strangers"] == 3
    assert beside["beside_tokens_per_s"] > 0
    assert beside["ended"] == 0
    assert [target["limit"] for target in result["targets"]] == [0.85, 0.6, 0.9, 0.9, 0]


def test_updates_of_a_server_are_measured() -> None:
    result = bench("updates", "--models", "demo", "--updates", "4", "--sequences", "4")
    rows = [(row["engine"], row["load"], row["updates"]) for row in result["rows"]]
    assert rows == [("embedded", "quiet", 4), ("embedded", "2 busy processes", 4), ("remote", "quiet", 4)]
    assert len(result["targets"]) == 5


def test_a_fleet_of_scripted_servers_is_kept_busy() -> None:
    load = ("--servers", "3", "--slots", "4", "--length", "40", "--seconds", "2", "--warm-up", "2")
    result = bench("control", *load)
    (row,) = result["rows"]
    assert (row["servers"], row["slots"], row["length"]) == (3, 4, 40)
    assert 0 < row["tokens_per_s"] <= 3 * 4 / row["step_s"] * 1.1
    assert row["updates"] > 0
    (target,) = result["targets"]
    assert (target["value"], target["limit"]) == (row["idle"], 0.03)
