"""Recipe -> what generates in one process: the embedded engine, or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from midflight.config import Recipe
from midflight.engine.engine import Engine, EngineLimits
from midflight.engine.loading import engine_model
from midflight.launch.importing import Joint, keys_of, own_options
from midflight.protocols import Generator

_EMBEDDED = "midflight.launch.engines:embedded_engine"
# With `http` it is servers that generate for a run; each of them, and every evaluation, has an engine of its own.
ENGINES: Joint[Generator] = Joint("engine.type", {"embedded": _EMBEDDED, "http": _EMBEDDED}, Generator)


def build_engine(
    recipe: Recipe, config: Any, weights: Mapping[str, Tensor], *, max_num_seqs: int, version: int = 0
) -> Generator:
    """`config`: the model's Hugging Face configuration. Raises: RecipeError if the user's own cannot be used."""
    of_run = {"model_config": config, "weights": weights, "max_num_seqs": max_num_seqs, "version": version}
    return ENGINES.make(recipe.engine.type, of_run | _settings(recipe), own_options(recipe.engine))


def check_engine(recipe: Recipe) -> None:
    """Raises: RecipeError if the user's own engine cannot be used."""
    of_run = dict.fromkeys(("model_config", "weights", "max_num_seqs", "version"))
    ENGINES.bind(recipe.engine.type, of_run | _settings(recipe), own_options(recipe.engine))


def _settings(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of engines, besides the options of one's own."""
    of_recipe = {"model_path": recipe.model.path, "max_new_tokens": recipe.sampling.max_tokens}
    return keys_of(recipe.engine) | of_recipe


def embedded_engine(
    model_config: Any,
    weights: Mapping[str, Tensor],
    *,
    max_num_seqs: int,
    version: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    max_batched_tokens: int,
    kv_cache_mib: int | None,
    max_update_pause_s: float,
    dtype: Literal["auto", "float32", "bfloat16"],
    device: str,
    recompute_kv: bool,
    prefix_caching: bool,
) -> Engine:
    """The arguments are keys of `[engine]`; `model_config`: the model's Hugging Face configuration."""
    limits = EngineLimits(
        max_num_seqs=max_num_seqs,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_batched_tokens=max_batched_tokens,
        kv_cache_bytes=None if kv_cache_mib is None else kv_cache_mib << 20,
        max_update_pause_s=max_update_pause_s,
    )
    model = engine_model(
        model_config,
        weights,
        max_length=limits.max_length,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        device=device,
    )
    return Engine(model, limits, version=version, recompute_kv=recompute_kv, prefix_caching=prefix_caching)
