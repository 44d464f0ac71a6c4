"""Comparisons: checks before any run starts, and the results of runs, which are faked here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.config.schedules import ConventionalConfig, PipelineConfig
from midflight.errors import RecipeError, RunDirectoryError, WorkerError
from midflight.experiments import compare as compare_module
from midflight.experiments.compare import Comparison, plan_comparison, run_comparison
from midflight.experiments.runs import RunLength
from midflight.experiments.variants import parse_variants
from midflight.trainer.checkpoints import checkpoints_in, save_checkpoint
from midflight.trainer.state import TrainerState
from narrowing import instance
from refusals import Refused

RECIPE = SHIPPED_RECIPES["cpu_demo"]


class FakeRuns:
    """Stand-in for `train`: writes the files of a run with three checkpoints and records its arguments."""

    def __init__(self) -> None:
        self.overrides: list[list[str]] = []
        self.directories: list[Path] = []

    def train(self, recipe: Path, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
        self.overrides.append([*overrides])
        self.directories.append(directory)
        directory.mkdir()
        schedule = load_recipe(recipe, overrides).schedule
        (directory / "config.toml").write_text(f'[schedule]\ntype = "{schedule.type}"\n')
        lines = [
            {"version": step, "wall_s": 1.0 * step, "samples": 32 * step, "reward/mean": 0.5} for step in range(1, 31)
        ]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step in (10, 20, 30):
            state = TrainerState(version=step, wall_s=1.0 * step)
            save_checkpoint(directory / "checkpoints", state, lambda path: None, keep=100)
        return {
            "train_wall_s": 30.0, "rollout_s": 20.0, "steps": 30, "samples": 960, "trained_tokens": 9600,
            "max_lag": 2, "mean_lag": 1.0, "mean_ess": 0.99, "idle": {"generation": 0.0, "trainer": 0.5},
            "carried_token_fraction": 0.0, "old_token_fraction": 0.5, "padding_fraction": 0.0, "update_pause_s": 0.001,
            "length_bias": {"ks": 0.01}, "dropped": {"filtered": 0, "queue_full": 0}, "versions_per_rollout_max": 3,
            "groups": {"started": 124, "trained": 120, "dropped": 0, "failed": 0, "unfinished": 4},
        }  # fmt: skip


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(compare_module, "train", fake.train)
    return fake


def plan(*overrides: str, schedules: str = "pipeline,april", losses: str = "", **options: Any) -> Comparison:
    variants = parse_variants("loss", losses) if losses else parse_variants("schedule", schedules)
    return plan_comparison(RECIPE, overrides, variants, **{"length": RunLength(seconds=7.0), **options})


def silent(_: str) -> None:
    pass


WRONG = [
    (["--schedules", "pipeline,sarsa"], "'sarsa'"),
    (["--schedules", "bounded:max_lg=2"], "unknown key schedule.max_lg; did you mean schedule.max_lag?"),
    (["--schedules", "pipeline,bounded:max_lag=-1"], "schedule.max_lag: should be greater than or equal to 0, got -1"),
    (["--schedules", "bounded:updates=never"], "schedule.updates: "),
    (["--schedules", "conventional:num_in_flight"], "'num_in_flight' in 'conventional:num_in_flight'"),
    (["--schedules", "april,pipeline,april"], "'april' and 'april' are the same schedule"),
    (["--schedules", "bounded,bounded:max_lag=1"], "'bounded' and 'bounded:max_lag=1' are the same schedule"),
    (["--schedules", "pipeline", "batch.batch_size=30"], "24 or 32 would work"),
    (["--schedules", "pipeline", "model.path=/nowhere"], "there is no directory /nowhere"),
    (
        ["--schedules", "pipeline", "trainer.max_steps=5"],
        "in a comparison, --seconds or --steps sets trainer.max_steps",
    ),
    (["--schedules", "pipeline", "run.directory=x"], "in a comparison, --out sets run.directory"),
    (["--schedules", "pipeline", "trainer.checkpoint_every=5"], "--accuracy-every sets"),
    (["--seconds", "0"], "--seconds: should be greater than 0, got 0"),
    (["--seconds", "nan"], "--seconds: should be greater than 0, got nan"),
    (["--steps", "0"], "--steps: should be at least 1, got 0"),
    (["--steps", "5", "--seconds", "5"], "--seconds and --steps cannot be used together; remove one of them"),
    (
        ["--schedules", "april", "--losses", "grpo"],
        "--schedules and --losses cannot be used together; remove one of them",
    ),
    (["--losses", "grpo,ppo"], "loss.type = 'ppo' learns a value function"),
    (["--losses", "grpo,grpo:clip_high=0.2"], "'grpo' and 'grpo:clip_high=0.2' are the same loss"),
    (["--losses", "sarsa"], "loss.type: there is no 'sarsa'"),
    (["--seeds", "0"], "--seeds: should be at least 1, got 0"),
    (["--accuracy-every", "-1"], "--accuracy-every: should be at least 0, got -1"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_input_is_one_line_and_starts_no_run(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    out = tmp_path / "out"
    assert message in refused("compare", RECIPE, *arguments, "--out", out)
    assert not out.exists()


def test_the_schedule_of_the_recipe_keeps_its_keys(runs: FakeRuns, tmp_path: Path) -> None:
    comparison = plan("schedule.num_in_flight=24", schedules="conventional,pipeline")
    run_comparison(comparison, tmp_path / "out", silent)
    conventional, pipeline = (load_recipe(RECIPE, overrides).schedule for overrides in runs.overrides)
    assert instance(conventional, ConventionalConfig).num_in_flight is None
    assert instance(pipeline, PipelineConfig).num_in_flight == 24


def test_schedules_alternate_under_the_same_conditions(runs: FakeRuns, tmp_path: Path) -> None:
    sets = 'eval.sets=[{name = "sums", task = {}}]'
    comparison = plan("run.seed=5", "eval.num_problems=9", "eval.every=3", sets, num_seeds=2)
    result = run_comparison(comparison, tmp_path / "out", silent)
    recipes = [load_recipe(RECIPE, overrides) for overrides in runs.overrides]
    assert [(recipe.run.seed, recipe.schedule.type) for recipe in recipes] == [
        (5, "pipeline"), (5, "april"), (6, "pipeline"), (6, "april"),
    ]  # fmt: skip
    assert {recipe.trainer.max_seconds for recipe in recipes} == {7.0}
    assert not any(recipe.eval.has_problems for recipe in recipes)
    assert min(recipe.trainer.max_steps for recipe in recipes) >= 1_000_000
    assert len(set(runs.directories)) == 4
    assert result["seeds"] == [5, 6]
    assert [row["schedule"] for row in result["rows"]] == ["pipeline", "april"]
    assert [run["run_directory"] for run in result["runs"]] == [directory.name for directory in runs.directories]
    assert result["rows"][0]["groups"]["started"] == 248


def test_the_result_is_written_and_drawn(runs: FakeRuns, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run_comparison(plan(), tmp_path / "out", silent)
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == result
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert result["seconds"] == 7.0
    assert len(result["runs"][0]["curve"]) == 30


def test_without_matplotlib_there_is_no_plot(runs: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reports: list[str] = []
    run_comparison(plan(), tmp_path / "out", reports.append)
    assert (tmp_path / "out" / "compare.json").exists()
    assert not (tmp_path / "out" / "compare.png").exists()
    assert any("midflight[plot]" in line for line in reports)


def test_checkpoints_are_evaluated_and_all_but_the_newest_deleted(
    runs: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[tuple[int, str]] = []

    def accuracy(recipe: Any, checkpoint: Path, grader: object) -> float:
        assert grader == "the grader"
        evaluated.append((recipe.eval.num_problems, checkpoint.name))
        return 0.87

    monkeypatch.setattr(compare_module, "sampled_accuracy", accuracy)
    monkeypatch.setattr(compare_module, "build_grader", lambda recipe: nullcontext("the grader"))
    comparison = plan("eval.num_problems=9", schedules="april", accuracy_every=10)
    result = run_comparison(comparison, tmp_path / "out", silent)
    assert result["rows"][0]["seconds_to_accuracy"] == {"0.8": 10.0, "0.85": 10.0, "0.9": None}
    assert result["rows"][0]["steps_to_accuracy"] == {"0.8": 10, "0.85": 10, "0.9": None}
    assert result["rows"][0]["final_accuracy"] == 0.87
    assert evaluated == [(9, "step_10"), (9, "step_20"), (9, "step_30")]
    trainer = load_recipe(RECIPE, runs.overrides[0]).trainer
    assert trainer.checkpoint_every == 10
    assert trainer.keep_checkpoints >= 1_000_000
    assert [path.name for path in checkpoints_in(runs.directories[0] / "checkpoints")] == ["step_30"]


@pytest.mark.parametrize(
    ("overrides", "every"), [(("trainer.checkpoint_every=15",), 0), (("eval.num_problems=0",), 10)]
)
def test_without_evaluation_the_recipe_sets_checkpoints(
    runs: FakeRuns, tmp_path: Path, overrides: tuple[str, ...], every: int
) -> None:
    result = run_comparison(plan(*overrides, accuracy_every=every), tmp_path / "out", silent)
    assert set(result["rows"][0]["seconds_to_accuracy"].values()) == {None}
    assert (
        load_recipe(RECIPE, runs.overrides[0]).trainer
        == load_recipe(RECIPE, [*overrides, "trainer.max_seconds=7", "trainer.max_steps=1000000000"]).trainer
    )
    assert len(checkpoints_in(runs.directories[0] / "checkpoints")) == 3


def test_a_nonempty_directory_stays_unchanged(runs: FakeRuns, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for out in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(RunDirectoryError, match="exists and is not an empty directory"):
            run_comparison(plan(), out, silent)
    assert runs.overrides == []
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_run_is_named_with_its_error(tmp_path: Path) -> None:
    """The run is a real process; its recipe is deleted before it starts."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[model]\npath = "{RECIPE.parent / "models" / "chain_sums"}"\n')
    comparison = plan_comparison(recipe, [], parse_variants("schedule", "april"), length=RunLength(seconds=1.0))
    recipe.unlink()
    with pytest.raises(WorkerError, match=r"out/april-seed-0 failed: cannot read the recipe"):
        run_comparison(comparison, tmp_path / "out", silent)


def test_two_schedules_may_differ_in_one_key() -> None:
    comparison = plan(schedules="bounded:max_lag=1,bounded:max_lag=2,one_step_off")
    assert [variant.text for variant in comparison.variants] == [
        "bounded:max_lag=1",
        "bounded:max_lag=2",
        "one_step_off",
    ]
    with pytest.raises(RecipeError):
        plan(schedules="bounded:max_lag=2,bounded:max_lag=2")


def test_losses_are_compared_over_the_same_optimizer_steps(runs: FakeRuns, tmp_path: Path) -> None:
    comparison = plan(losses="dapo,ppo:advantage.type=value", length=RunLength(steps=30))
    result = run_comparison(comparison, tmp_path / "out", silent)
    dapo, ppo = (load_recipe(RECIPE, overrides) for overrides in runs.overrides)
    assert (dapo.loss.type, dapo.advantage.type) == ("dapo", "group_mean_std")
    assert (ppo.loss.type, ppo.advantage.type) == ("ppo", "value")
    assert {(recipe.trainer.max_steps, recipe.trainer.max_seconds) for recipe in (dapo, ppo)} == {(30, None)}
    assert [row["loss"] for row in result["rows"]] == ["dapo", "ppo:advantage.type=value"]
    assert (result["seconds"], result["steps"]) == (None, 30)
