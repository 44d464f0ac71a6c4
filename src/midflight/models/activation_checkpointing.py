"""Activation checkpointing: less memory for a third more arithmetic."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from midflight.errors import ModelError


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers that a Hugging Face model repeats; none if it does not say which they are."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def check_layers(model: Any) -> None:
    """Raises: ModelError if nobody knows what to compute again."""
    if not decoder_layers(model):
        raise ModelError(
            f"trainer.activation_checkpointing: {type(model).__name__} does not say which modules are its decoder"
            " layers; false would work"
        )


def checkpoint_layers(model: Any) -> None:
    """From now on each decoder layer keeps its input only, and is computed again in the backward pass.

    Gradients stay the same to the last bit: nothing in a layer is random, as models are in evaluation mode. Names of
    parameters stay, too.
    """
    for layer in decoder_layers(model):
        recomputed = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = recomputed
