"""Run from the command line in which every replaceable part is user-defined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES
from midflight.metrics.jsonl import read_metrics
from refusals import Refused

TESTS = Path(__file__).parents[1]
RECIPE = SHIPPED_RECIPES["cpu_demo"]


@pytest.mark.slow
def test_a_run_of_user_defined_parts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = (
        "schedule.type=own_parts:InTurns",
        "schedule.options.backwards=true",
        "advantage.type=own_parts:centered",
        "advantage.options.scale=2.0",
        "engine.type=own_parts:logging_engine",
        f"engine.options.log={tmp_path / 'engines'}",
        "streams.type=own_parts:CountedStream",
        "streams.options.suffix=.count",
        "weights.type=own_parts:OwnDirectory",
        "weights.options.name=mine",
        "metrics.sinks=['own_parts:TextSink', 'own_parts:FailingSink']",
        "preprocess.num_workers=1",
        "batch.batch_size=16",
        "eval.num_problems=0",
        "trainer.max_steps=3",
    )
    done = subprocess.run(
        [sys.executable, "-m", "midflight", "train", str(RECIPE), f"run.directory={run}", *settings, "--json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["samples"], summary["max_lag"]) == (3, 48, 0)
    assert (tmp_path / "engines").read_text() == "chain_sums 16\n"
    # A fourth batch may be on its way when the trainer ends.
    for name in ("groups", "batches"):
        assert (run / "streams" / f"{name}.count").read_text() in ("3", "4")
    assert (run / "mine" / "newest").exists()
    lines = read_metrics(run / "metrics.jsonl")
    written = [f"{line['version']} {line['reward/mean']}" for line in lines]
    assert (run / "steps.txt").read_text().splitlines() == ["after 0", *written]
    assert done.stderr.count("metrics sink own_parts:FailingSink failed and gets no more lines") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "schedule.type=own_parts:Nothing",
            "schedule.type: 'own_parts:Nothing' does not implement Schedule: it lacks colocated, max_in_flight,"
            " num_to_admit, should_abort, choose_batch, should_update_weights",
        ),
        ("engine.type=nowhere:Engine", "engine.type: cannot import 'nowhere:Engine': No module named 'nowhere'"),
        ("trainer.backend=single", "trainer.backend is now trainer.type"),
    ],
)
def test_an_unusable_part_is_a_one_line_error(tmp_path: Path, override: str, message: str, refused: Refused) -> None:
    run = tmp_path / "run"
    assert refused("train", RECIPE, f"run.directory={run}", override) == f"midflight: {message}"
    assert not run.exists()
