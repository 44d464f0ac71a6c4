"""Tiny random models of each family that the engine runs: real transformers modules, milliseconds per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from midflight.engine.engine import Engine, EngineLimits
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.loading import engine_model
from midflight.engine.running_batch import StopRules
from midflight.models.attention import register_packed_attention
from midflight.models.loading import weights_of
from midflight.protocols import IncomingWeights, LocalEngine

VOCAB_SIZE = 44


def tiny_model(family: str = "qwen2", seed: int = 0, **options: Any) -> Any:
    """Return a float32 causal LM with packed attention; all parameters are random, biases and norms included."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "attn_implementation": register_packed_attention(),
    }
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "gpt2": (GPT2Config, GPT2LMHeadModel),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM),
        "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    }[family]
    if family == "gpt2":
        del sizes["num_key_value_heads"], sizes["intermediate_size"]
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    # A small window, so that the sequences of a test grow past it.
    if family.startswith("gemma"):
        sizes |= {"head_dim": 16, "sliding_window": 8}
    model = model_class(config_class(**{**sizes, **options})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.copy_(center + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tiny_engine(
    model: Any,
    *,
    max_num_seqs: int = 8,
    max_new_tokens: int = 24,
    version: int = 0,
    kernels: ReferenceKernels | None = None,
    fused: bool = True,
    recompute_kv: bool = False,
    stop_rules: StopRules | None = None,
    **limits: Any,
) -> Engine:
    """Return an engine over a copy of the model's weights; `fused = False` always runs the transformers module."""
    runner = engine_model(model.config, weights_of(model), max_length=32 + max_new_tokens, kernels=kernels, fused=fused)
    bounds = EngineLimits(max_num_seqs=max_num_seqs, max_prompt_tokens=32, max_new_tokens=max_new_tokens, **limits)
    return Engine(runner, bounds, version=version, recompute_kv=recompute_kv, stop_rules=stop_rules)


def stage_and_adopt(engine: LocalEngine, version: int, weights: Mapping[str, Tensor]) -> None:
    """Let the next step of an engine sample with these weights."""
    engine.stage(IncomingWeights(version, version, weights.items()))
    engine.adopt(version)
