"""Command `midflight eval`, and evaluations during a run with real processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from midflight.config import SHIPPED_RECIPES
from midflight.config.run_directory import RunDirectory
from midflight.metrics.evaluations import best_version, read_evaluations
from midflight.metrics.jsonl import read_metrics
from midflight.trainer.checkpoints import checkpoint_of
from refusals import Refused

RECIPE = SHIPPED_RECIPES["cpu_demo"]
SMALL = ("engine.threads=1", "trainer.threads=1", "batch.batch_size=16")
SETS = (
    "eval.sets=["
    '{name = "short", samples = 4, num_problems = 12, temperature = 0.7, top_p = 0.9, max_tokens = 40,'
    " task = {options = {max_terms = 4}}},"
    '{name = "turns", num_problems = 6, max_tokens = 180, task = {type = "running_sums"}}]'
)


def midflight(*arguments: object) -> str:
    command = [sys.executable, "-m", "midflight", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, dict[str, Any]]:
    """A run of 9 steps that was evaluated at steps 4 and 8, and its summary."""
    run = RunDirectory(tmp_path_factory.mktemp("evaluated") / "run")
    settings = (
        *("schedule.type=conventional", f"run.directory={run.path}", *SMALL, "trainer.max_steps=9"),
        *("trainer.keep_checkpoints=1", "trainer.keep_best=true", "trainer.checkpoint_every=3"),
        *("eval.num_problems=16", "eval.every=4", SETS),
    )
    return run, json.loads(midflight("train", RECIPE, *settings, "--json"))


@pytest.mark.slow
def test_a_run_is_evaluated_before_during_and_after(finished: tuple[RunDirectory, dict[str, Any]]) -> None:
    run, summary = finished
    lines = read_evaluations(run.evaluations)
    assert [line["version"] for line in lines] == [0, 4, 8, 9]
    # Training may end before the answers of version 8; then its checkpoint is evaluated after the run.
    assert [line["when"] for line in lines][:2] == ["before", "during"]
    assert lines[2]["when"] in ("during", "after")
    assert lines[3]["when"] == "after"
    assert all(list(line["sets"]) == ["held_out", "short", "turns"] for line in lines)
    assert summary["evaluations"]["generated_tokens"] == sum(line.get("generated_tokens", 0) for line in lines) > 0
    assert summary["evaluations"]["best_version"] == best_version(lines)
    in_metrics = [line for line in read_metrics(run.metrics) if "eval/version" in line]
    assert [line["eval/version"] for line in in_metrics] == [4, 8][: len(in_metrics)]
    assert in_metrics[0]["eval/short/avg@4"] == lines[1]["sets"]["short"]["avg"]["value"]


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_gives_the_same_numbers(
    finished: tuple[RunDirectory, dict[str, Any]],
) -> None:
    run, summary = finished
    best = summary["evaluations"]["best_version"]
    assert (run.checkpoints / "best").resolve() == checkpoint_of(run.checkpoints, best)
    (line,) = [line for line in read_evaluations(run.evaluations) if line["version"] == best]
    again = json.loads(midflight("eval", run.path, "--best", "--json"))
    assert again.pop("model") == str(checkpoint_of(run.checkpoints, best))
    assert {key: line[key] for key in again} == again


@pytest.mark.slow
def test_numbers_during_the_run_equal_those_of_the_checkpoint(tmp_path: Path) -> None:
    """The schedule updates in flight; the engines answer beside rollouts and wait with newer weights."""
    run = RunDirectory(tmp_path / "run")
    overrides = (*SMALL, "eval.num_problems=8", SETS)
    settings = ("schedule.num_in_flight=16", "trainer.max_steps=20", "trainer.keep_checkpoints=100", "eval.every=3")
    midflight("train", RECIPE, *overrides, *settings, f"run.directory={run.path}", "--json")
    line = read_evaluations(run.evaluations)[1]
    assert (line["when"], line["version"] % 3) == ("during", 0)
    checkpoint = checkpoint_of(run.checkpoints, line["version"])
    again = json.loads(midflight("eval", checkpoint, RECIPE, *overrides, "--json"))
    assert {key: line[key] for key in again if key != "model"} | {"model": str(checkpoint)} == again


@pytest.mark.slow
def test_a_table_shows_figures_with_errors(finished: tuple[RunDirectory, dict[str, Any]]) -> None:
    run, _ = finished
    table = midflight("eval", run.path, "eval.num_problems=0", SETS.replace("12", "6"))
    assert re.search(r"^short +6 +4( +\d\.\d{3} ± \d\.\d{3}){3} +- +\d+\.\d +0$", table, re.MULTILINE)
    assert re.search(r"^  difficulty 2 +\d", table, re.MULTILINE)


def test_a_model_needs_a_recipe(refused: Refused) -> None:
    model = RECIPE.parent / "models" / "chain_sums"
    line = refused("eval", model)
    assert line.endswith(f"so a recipe is needed: midflight eval {model} RECIPE")


def test_best_needs_a_run(refused: Refused) -> None:
    assert "--best needs a run directory" in refused("eval", RECIPE.parent / "models" / "chain_sums", RECIPE, "--best")


def test_a_run_without_a_checkpoint_cannot_be_evaluated(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(RECIPE.read_bytes())
    assert refused("eval", tmp_path).endswith("has no checkpoint yet")
    assert "has no best checkpoint; trainer.keep_best" in refused("eval", tmp_path, "--best")


def test_nothing_to_evaluate_is_refused(refused: Refused) -> None:
    assert "there is nothing to evaluate" in refused("eval", RECIPE, "eval.num_problems=0")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ('eval.sets=[{name = "held_out", task = {}}]', "'held_out' is the name of the task's held-out problems"),
        ('eval.sets=[{name = "a", task = {}}, {name = "a", task = {}}]', "'a' is the name of 2 sets"),
        ("trainer.keep_best=true", "trainer.keep_best needs evaluations during the run"),
        ('eval.sets=[{name = "a", task = {options = {max_terms = 99}}}]', "max_terms = 99"),
        ('eval.sets=[{name = "a", task = {options = {min_terms = 25, max_terms = 25}}}]', "set a has 51 tokens"),
    ],
)
def test_wrong_evaluation_settings_are_refused(refused: Refused, override: str, reason: str) -> None:
    assert reason in refused("train", RECIPE, "engine.max_prompt_tokens=50", override)


def test_evaluations_take_place_at_the_end_of_rl_steps(refused: Refused) -> None:
    line = refused("train", RECIPE, "schedule.type=conventional", "schedule.steps_per_rl_step=4", "eval.every=10")
    assert "eval.every = 10 is not a multiple of schedule.steps_per_rl_step = 4" in line
    assert line.endswith("8 or 12 would work")
