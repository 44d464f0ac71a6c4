"""Recipe -> the engine of one process: the embedded engine, or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from midflight.config import Recipe
from midflight.engine.engine import Engine, EngineLimits
from midflight.engine.loading import engine_model
from midflight.engine.running_batch import StopRules
from midflight.launch.importing import Joint, keys_of, own_options
from midflight.protocols import LocalEngine

_EMBEDDED = "midflight.launch.engines:embedded_engine"
# With `http`, servers generate for a run. Each server and every evaluation still has its own embedded engine.
ENGINES: Joint[LocalEngine] = Joint("engine.type", {"embedded": _EMBEDDED, "http": _EMBEDDED}, LocalEngine)


def build_engine(
    recipe: Recipe,
    config: Any,
    weights: Mapping[str, Tensor],
    *,
    max_num_seqs: int,
    version: int = 0,
    max_new_tokens: int | None = None,
    max_total_tokens: int | None = None,
    stop_rules: StopRules | None = None,
) -> LocalEngine:
    """Return the engine; `config` is the model's Hugging Face configuration.

    `stop_rules`: for requests with stop strings; without them, callers must cut responses.
    `max_new_tokens`: largest length of a response; default: the limit of a run.
    `max_total_tokens`: limit of the embedded engine for prompt and response together; default: the sum of their limits.
    Raises: RecipeError if the user's own engine cannot be used.
    """
    offered: dict[str, Any] = {
        "model_config": config,
        "weights": weights,
        "max_num_seqs": max_num_seqs,
        "version": version,
    }
    if stop_rules:
        offered["stop_rules"] = stop_rules
    if max_total_tokens:
        offered["max_total_tokens"] = max_total_tokens
    settings = _settings(recipe)
    if max_new_tokens:
        settings["max_new_tokens"] = max_new_tokens
    return ENGINES.make(recipe.engine.type, offered | settings, own_options(recipe.engine))


def check_engine(recipe: Recipe) -> None:
    """Check that the recipe's engine can be used. Raises: RecipeError if the user's own engine cannot."""
    offered = dict.fromkeys(("model_config", "weights", "max_num_seqs", "version"))
    ENGINES.bind(recipe.engine.type, offered | _settings(recipe), own_options(recipe.engine))


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Arguments from the recipe that every engine may take."""
    shared = {"model_path": recipe.model.path, "max_new_tokens": recipe.max_new_tokens}
    return keys_of(recipe.engine) | shared


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
    weight_sets: int,
    dtype: Literal["auto", "float32", "bfloat16"],
    device: str,
    recompute_kv: bool,
    prefix_caching: bool,
    max_total_tokens: int | None = None,
    stop_rules: StopRules | None = None,
) -> Engine:
    """Return the embedded engine. The arguments are described at `midflight.protocols.LocalEngine`."""
    limits = EngineLimits(
        max_num_seqs=max_num_seqs,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_batched_tokens=max_batched_tokens,
        kv_cache_bytes=None if kv_cache_mib is None else kv_cache_mib << 20,
        max_total_tokens=max_total_tokens,
    )
    model = engine_model(
        model_config,
        weights,
        max_length=limits.max_length,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        device=device,
        num_weight_sets=weight_sets,
    )
    return Engine(
        model,
        limits,
        version=version,
        recompute_kv=recompute_kv,
        prefix_caching=prefix_caching,
        stop_rules=stop_rules,
    )
