"""Lengths that a server takes from the model's context, unless the recipe sets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES, model_recipe
from midflight.errors import RecipeError
from midflight.run.serve import with_model_limits

MODEL = SHIPPED_RECIPES["cpu_demo"].parent / "models" / "chain_sums"  # with a context of 256 tokens


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        ([], (255, 255, 256)),
        (["engine.max_prompt_tokens=100"], (100, 255, 256)),
        (["sampling.max_tokens=100"], (255, 100, 256)),
        (["engine.max_prompt_tokens=100", "sampling.max_tokens=60"], (100, 60, None)),
    ],
)
def test_unset_lengths_come_from_the_model(overrides: list[str], limits: tuple[int, int, int | None]) -> None:
    recipe, context = with_model_limits(model_recipe(MODEL, overrides))
    assert (recipe.engine.max_prompt_tokens, recipe.sampling.max_tokens, context) == limits


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    """Directory with the configuration of a model whose float32 pages of 16 tokens have 256 KiB."""
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": 32, "layer_types": ["full_attention"] * 32, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "context"),
    [
        ([], (8 - 1) * 16),
        (["engine.dtype=bfloat16"], (16 - 1) * 16),
        (["engine.kv_cache_mib=1"], (4 - 1) * 16),
    ],
)
def test_small_memory_shortens_the_context(
    long_model: Path, overrides: list[str], context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page is never allocated to a sequence."""
    monkeypatch.setattr("midflight.run.serve._memory_bytes", lambda device: 8 << 20)
    recipe, total = with_model_limits(model_recipe(long_model, overrides))
    assert (total, recipe.engine.max_prompt_tokens) == (context, context - 1)
    assert recipe.engine.kv_cache_mib == (1 if overrides == ["engine.kv_cache_mib=1"] else 2)


def test_length_of_the_whole_context_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"engine.max_prompt_tokens = 256 leaves no room .* 255 or less would work"):
        with_model_limits(model_recipe(MODEL, ["engine.max_prompt_tokens=256"]))
