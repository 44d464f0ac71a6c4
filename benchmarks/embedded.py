"""Construction of the embedded engine for all benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from midflight.engine.engine import Engine, EngineLimits
from midflight.engine.loading import engine_model
from midflight.models.loading import load_config, load_model, weights_of
from midflight.protocols import LocalEngine


class EmbeddedEngine(NamedTuple):
    """Idle engine at weight version 0, its weights, and the dtype it computes in."""

    generator: LocalEngine
    weights: dict[str, Tensor]
    compute_dtype: str


def build_embedded_engine(
    directory: Path,
    dtype: str,
    *,
    max_num_seqs: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    device: str = "cpu",
) -> EmbeddedEngine:
    """Build an idle engine. Raises: ModelError if the directory holds no model that the engine can run."""
    weights = weights_of(load_model(directory, getattr(torch, dtype)))
    limits = EngineLimits(
        max_num_seqs=max_num_seqs,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        # All prompts fit into one step, so that all sequences decode together from first to last token.
        max_batched_tokens=max_num_seqs * (max_prompt_tokens + 1),
    )
    model = engine_model(load_config(directory), weights, max_length=limits.max_length, device=device)
    return EmbeddedEngine(Engine(model, limits), weights, str(model.dtype).removeprefix("torch."))
