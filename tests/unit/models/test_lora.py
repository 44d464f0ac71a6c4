"""Adapters and merged weights compute the same, in every kind of layer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import MissingExtraError, RecipeError
from midflight.launch.build import check_recipe
from midflight.models.lora import LoraSettings, add_adapter, has_adapter, merged_weights
from midflight.testing.tiny_models import tiny_model

RECIPE = SHIPPED_RECIPES["cpu_demo"]
LORA = "trainer.lora_rank=4"
TOKEN_IDS = torch.arange(3, 30)[None]


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKEN_IDS).logits
    return found


@pytest.mark.parametrize("targets", [None, ("down_proj", "q_proj"), ("c_attn",)])
@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2", "gemma2"])
def test_merged_weights_equal_base_plus_adapter(family: str, targets: tuple[str, ...] | None) -> None:
    if targets and (family == "gpt2") != (targets == ("c_attn",)):
        return
    base, adapted = (tiny_model(family, attn_implementation="eager").double() for _ in range(2))
    assert not has_adapter(adapted)
    add_adapter(adapted, LoraSettings(rank=3, alpha=7.0, targets=targets), Path("base"))
    assert has_adapter(adapted)
    assert torch.equal(logits(adapted), logits(base))
    adapted.double()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    assert (logits(adapted) - logits(base)).abs().max() > 0.01
    unmerged = {name: parameter.clone() for name, parameter in adapted.named_parameters()}
    merged = dict(merged_weights(adapted))
    assert list(merged) == [name for name, _ in base.named_parameters()]
    base.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(adapted), logits(base), atol=1e-12, rtol=1e-12)
    assert all(torch.equal(parameter, unmerged[name]) for name, parameter in adapted.named_parameters())


def test_unknown_target_is_reported_with_the_choices() -> None:
    recipe = load_recipe(RECIPE, [LORA, 'trainer.lora_targets=["q_proj", "query", "lm_head"]'])
    expected = (
        "trainer.lora_targets: the model has no linear layers query, lm_head;"
        " choose from q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    )
    with pytest.raises(RecipeError) as raised:
        check_recipe(recipe)
    assert str(raised.value) == expected


def test_error_without_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"midflight\[lora\]"):
        check_recipe(load_recipe(RECIPE, [LORA]))


@pytest.mark.parametrize("key", ["lora_alpha=8", 'lora_targets=["q_proj"]'])
def test_adapter_options_need_a_rank(key: str) -> None:
    name = key.partition("=")[0]
    with pytest.raises(RecipeError, match=rf"{name} needs LoRA adapters, but lora_rank is not set"):
        load_recipe(RECIPE, [f"trainer.{key}"])
