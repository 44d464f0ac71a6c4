"""Run directories: the overrides that a resumed run accepts, and the locks."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import RecipeError, RunDirectoryError
from midflight.run.directory import create_run, open_run

RECIPE = SHIPPED_RECIPES["cpu_demo"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(load_recipe(RECIPE, [f"run.directory={tmp_path / 'run'}", "preprocess.num_workers=1"]))


@pytest.mark.parametrize(
    "override", ["trainer.max_steps=3", "engine.threads=2", "eval.num_problems=0", "preprocess.threads=2"]
)
def test_a_resumed_run_accepts_runtime_overrides(run: RunDirectory, override: str) -> None:
    section, key = override.split("=")[0].split(".")
    _, recipe = open_run(run.path, [override])
    assert str(getattr(getattr(recipe, section), key)) == override.split("=")[1]
    assert recipe.num_preprocess_workers == 1


@pytest.mark.parametrize("override", ["batch.batch_size=64", "preprocess.num_workers=0"])
def test_a_resumed_run_rejects_other_overrides(run: RunDirectory, override: str) -> None:
    """Without the preprocess process, the groups that wait for it would be lost."""
    with pytest.raises(RecipeError) as raised:
        open_run(run.path, ["trainer.max_steps=3", override])
    message = str(raised.value)
    section = override.partition(".")[0]
    assert f"override {override}: a resumed run keeps its {section}" in message
    assert "only engine, eval, metrics, preprocess.device, preprocess.threads, supervisor, trainer" in message
    assert "\n" not in message


def test_a_run_in_use_stays_unchanged(run: RunDirectory) -> None:
    files = sorted(run.path.rglob("*"))
    with run.locked():
        with pytest.raises(RunDirectoryError, match="is in use by another process"), run.locked():
            pass
        assert sorted(run.path.rglob("*")) == sorted([*files, run.path / ".lock"])
    with run.locked():
        pass


def test_two_processes_cannot_have_one_name(run: RunDirectory) -> None:
    with run.worker_locked("rollout"), run.worker_locked("trainer"):
        again = run.worker_locked("trainer")
        with pytest.raises(RunDirectoryError, match="a trainer process is already running"):
            again.__enter__()
    with run.worker_locked("trainer"):
        pass


@pytest.mark.parametrize("override", ["trainer.lora_rank=8", "trainer.lora_alpha=1", 'trainer.lora_targets=["q_proj"]'])
def test_a_resumed_run_rejects_other_lora_settings(run: RunDirectory, override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(RecipeError, match=f"a resumed run keeps its {key}"):
        open_run(run.path, [override])
