"""check_engine_runs: refuses models that the engine cannot run, from their configuration alone, and no other models."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from midflight.engine.loading import check_engine_runs
from midflight.errors import ModelError
from midflight.testing.tiny_models import tiny_model

SIZES = {
    "vocab_size": 44,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
LATENT |= {"v_head_dim": 16}


def config(family: str, **options: Any) -> Any:
    return CONFIG_MAPPING[family](**{**SIZES, **options})


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"])
def test_latent_attention_is_refused(family: str) -> None:
    message = rf"cannot run {family} \(multi-head latent attention\): layer 0 has keys .* values .* for 4 heads of"
    with pytest.raises(ModelError, match=message):
        check_engine_runs(config(family, **LATENT))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt_oss", {"head_dim": 8}, "s_aux"),  # attention sinks
        ("doge", {}, "gives its attention a mask"),
        ("roberta", {}, "attends to later tokens"),
        ("diffllama", {}, "do not each call a replaceable attention once"),
        ("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2}, "do not each call a replaceable attention once"),
        ("gptj", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}, "attention cannot be replaced"),
        ("phimoe", {"sliding_window": 8}, "sliding_window = 8 does not reach its attention"),
        ("gemma4_text", {}, "head_dim"),
    ],
)
def test_unsupported_attention_is_refused(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        check_engine_runs(config(family, **options))
    assert "\n" not in str(caught.value)


def test_model_of_text_and_images_is_refused() -> None:
    with pytest.raises(ModelError, match="not gemma3 with images or sound; its text part, saved as gemma3_text, would"):
        check_engine_runs(CONFIG_MAPPING["gemma3"]())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2", "gemma3"])
def test_models_of_the_test_suite_are_accepted(family: str) -> None:
    check_engine_runs(tiny_model(family).config)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "olmo2", "qwen3_moe", "starcoder2"])
def test_other_decoders_are_accepted(family: str) -> None:
    check_engine_runs(config(family, num_key_value_heads=2, sliding_window=8, head_dim=8))
