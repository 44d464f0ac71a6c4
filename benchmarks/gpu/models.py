"""Models with seeded random weights, in the shapes of published ones: no download is needed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu.setting import Setting
from benchmarks.models import DEMO_RECIPE, BenchModel, find_model
from midflight.config import load_recipe
from midflight.models.loading import quiet

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2_shape": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    },
    "llama_1b_shape": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
}
_SMALL = {
    "vocab_size": 200,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def random_model(setting: Setting, shape: str) -> BenchModel:
    """Return a bfloat16 model of this shape; checks of the same run share its directory."""
    directory = setting.scratch_path / shape
    if not directory.is_dir():
        draft = setting.scratch_path / f"{shape}.{torch.randint(1 << 30, ()).item()}"
        torch.manual_seed(0)
        sizes = _SMALL if setting.small else SHAPES[shape]
        config = LlamaConfig(**sizes, tie_word_embeddings=True, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2)
        with quiet(), setting.on:  # a billion random numbers take seconds on a CPU
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(draft)
        for name in _TOKENIZER_FILES:  # of another model; no check reads text
            shutil.copy(demo_model() / name, draft)
        draft.rename(directory)
    return find_model(str(directory))


def demo_model() -> Path:
    """Return the directory of the demo's starting policy."""
    return load_recipe(DEMO_RECIPE, []).model.path
