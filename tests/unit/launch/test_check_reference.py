"""A reference model that does not fit is refused before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import ModelError, RecipeError
from midflight.launch.build import check_evaluation, check_recipe
from midflight.testing.tiny_models import tiny_model

RECIPE = SHIPPED_RECIPES["cpu_demo"]
MODEL = RECIPE.parent / "models" / "chain_sums"


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    directory = tmp_path / "other"
    tiny_model(vocab_size=50).save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    return directory


def check(*overrides: str) -> None:
    check_recipe(load_recipe(RECIPE, ["loss.kl_coefficient=0.01", *overrides]))


def test_fitting_reference_passes() -> None:
    check()
    check(f"reference.path={MODEL}")


def test_reference_with_another_vocabulary_is_refused(other_model: Path) -> None:
    with pytest.raises(ModelError) as raised:
        check(f"reference.path={other_model}")
    assert str(raised.value) == (
        f"reference.path: {other_model} has a vocabulary of 50 tokens, but model.path = {MODEL} has 44: their"
        " probabilities cannot be compared"
    )


def test_wrong_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reference\.path: there is no directory .*/nothing"):
        check(f"reference.path={tmp_path / 'nothing'}")
    with pytest.raises(
        ModelError, match=r"reference\.path: .* has no config\.json, no tokenizer\.json, no \*\.safeten"
    ):
        check(f"reference.path={tmp_path}")


def test_path_and_url_together_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"are two reference models; either one would work"):
        check(f"reference.path={MODEL}", "reference.url=http://127.0.0.1:9")


def test_wrong_url_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"reference\.url: .*pattern"):
        check("reference.url=localhost:8000")


def test_unreachable_url_is_refused() -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(RecipeError, match=rf"^reference\.url: {url} cannot be reached: .*refused"):
        check(f"reference.url={url}")
    # Evaluation needs no reference.
    check_evaluation(load_recipe(RECIPE, ["loss.kl_coefficient=0.01", f"reference.url={url}"]))
