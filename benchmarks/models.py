"""Models for benchmarks, by name or by directory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import RecipeError
from midflight.models.loading import check_model_directory, load_config
from midflight.models.smollm2 import smollm2_directory

DEMO_RECIPE = SHIPPED_RECIPES["cpu_demo"]
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class BenchModel:
    """Model directory and the two sizes that benchmarks need."""

    name: str
    directory: Path
    vocab_size: int
    matmul_parameters: int  # parameters multiplied per token: all but an untied embedding

    @property
    def default_dtypes(self) -> tuple[str, ...]:
        return DTYPES if self.name == "smollm2" else ("float32",)


def find_model(name: str) -> BenchModel:
    """Find `demo` (the demo's starting policy), `smollm2`, or the model in a directory.

    Raises: ModelError if there is no such model.
    """
    match name:
        case "demo":
            directory = load_recipe(DEMO_RECIPE, []).model.path
        case "smollm2":
            directory = smollm2_directory()
        case path:
            directory = Path(path)
    check_model_directory(directory)
    config = load_config(directory)
    return BenchModel(name, directory.resolve(), config.vocab_size, _matmul_parameters(directory, config))


def check_dtype(name: str) -> str:
    """Return the name.

    Raises: RecipeError if benchmarks do not support the dtype.
    """
    if name not in DTYPES:
        raise RecipeError(f"--dtype: {name!r} is not {' or '.join(DTYPES)}")
    return name


def _matmul_parameters(directory: Path, config: Any) -> int:
    total = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total if config.tie_word_embeddings else total - config.vocab_size * config.hidden_size
