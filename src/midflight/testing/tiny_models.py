"""Tiny random models of each family the engine runs: real transformers modules, milliseconds a step."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from midflight.engine.decoder import DecoderShape
from midflight.engine.engine import Engine
from midflight.models.attention import PACKED_ATTENTION
from midflight.models.loading import weights_of

VOCAB_SIZE = 44


def tiny_model(family: str = "qwen2", seed: int = 0, **options: Any) -> Any:
    """A float32 causal LM with packed attention; every parameter is random, biases and norms included."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "attn_implementation": PACKED_ATTENTION,
    }
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    model = model_class(config_class(**{**sizes, **options})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.copy_(center + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tiny_engine(model: Any, *, num_rows: int = 8, max_new_tokens: int = 24, version: int = 0) -> Engine:
    """An engine over a copy of the model's weights."""
    return Engine(
        DecoderShape.from_hf_config(model.config),
        weights_of(model),
        num_rows=num_rows,
        max_prompt_tokens=32,
        max_new_tokens=max_new_tokens,
        version=version,
    )
