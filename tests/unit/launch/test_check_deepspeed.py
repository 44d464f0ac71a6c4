"""Recipes that are refused for DeepSpeed, with and without the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.config.sections import DeepSpeedTrainerConfig, SingleTrainerConfig
from midflight.errors import MissingExtraError, RecipeError
from midflight.launch import build
from midflight.launch.build import check_recipe

RECIPE = SHIPPED_RECIPES["cpu_demo"]
DEEPSPEED, ZERO_3 = "trainer.type=deepspeed", "trainer.zero_stage=3"
PROXIMAL = ("loss.type=decoupled_ppo", "loss.proximal_every=4")


def check(monkeypatch: pytest.MonkeyPatch, *overrides: str, installed: bool = True) -> None:
    monkeypatch.setattr(build, "is_installed", lambda: installed)
    check_recipe(load_recipe(RECIPE, [DEEPSPEED, *overrides]))


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtraError, match=r"midflight\[deepspeed\]"):
        check(monkeypatch, installed=False)


def test_zero_3_refuses_an_older_proximal_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError) as raised:
        check(monkeypatch, ZERO_3, *PROXIMAL)
    assert str(raised.value) == (
        "loss.proximal_every = 4 needs an older policy, which trainer.zero_stage = 3 does not keep;"
        " loss.proximal_every = 1, trainer.zero_stage = 2 or trainer.type = 'fsdp' would work"
    )


@pytest.mark.parametrize("overrides", [(), PROXIMAL, (ZERO_3, PROXIMAL[0], "loss.proximal_every=1")])
def test_other_recipes_pass(monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]) -> None:
    check(monkeypatch, *overrides)


def test_change_of_trainer_drops_the_zero_stage(tmp_path: Path) -> None:
    """The recipe of a resumed run has the stage, also if the run resumes with another trainer."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "model"\n[trainer]\ntype = "deepspeed"\nzero_stage = 3\n')
    kept = load_recipe(recipe, [DEEPSPEED]).trainer
    assert isinstance(kept, DeepSpeedTrainerConfig)
    assert kept.zero_stage == 3
    assert load_recipe(recipe, ["trainer.type=single"]).trainer == SingleTrainerConfig()
