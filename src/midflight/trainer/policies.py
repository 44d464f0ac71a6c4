"""The policy in training: a model from a directory, with the settings of the recipe.

With a dtype of bfloat16, trained parameters are still float32, and frozen parameters are bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from midflight.models.activation_checkpointing import check_layers, checkpoint_layers
from midflight.models.loading import Named, load_model, load_skeleton, weights_of
from midflight.models.lora import LoraSettings, add_adapter, check_lora, has_adapter, merged_weights
from midflight.models.policy import PackedPolicy
from midflight.trainer.full_tensors import full_tensors
from midflight.types import TensorSpec
from midflight.weights.specs import specs_of

ADAPTER_DIRECTORY = (
    "adapter"  # in a checkpoint; beside config.json, transformers would mistake the files for the model's
)


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of the policy: outputs besides log-probabilities, precision, trained parameters."""

    temperature: float = 1.0  # of the sampling distribution
    with_values: bool = False
    entropy_gradient: bool = False
    dtype: torch.dtype = torch.float32  # of forward and backward passes, and of published weights
    activation_checkpointing: bool = False
    lora: LoraSettings | None = None
    checkpoint_dtype: torch.dtype = torch.float32  # of the model in checkpoints; masters are saved besides


PLAIN_POLICY = PolicySettings()


def build_policy(
    path: Path, settings: PolicySettings, load: Callable[[Path, torch.dtype], nn.Module] = load_model
) -> PackedPolicy:
    """Load the model and apply the settings.

    Raises: ModelError if the model cannot be loaded; otherwise as `check_policy`.
    """
    model = load(path, settings.dtype if settings.lora else torch.float32)
    if settings.lora:
        add_adapter(model, settings.lora, path)
    if settings.activation_checkpointing:
        checkpoint_layers(model)
    return PackedPolicy(model, settings.temperature, settings.with_values, settings.entropy_gradient)


def check_policy(path: Path, settings: PolicySettings) -> None:
    """Check that the model supports the settings, without reading weights.

    Raises: RecipeError, ModelError; MissingExtraError without the package peft.
    """
    if settings.activation_checkpointing or settings.lora:
        model = load_skeleton(path)
        if settings.activation_checkpointing:
            check_layers(model)
        if settings.lora:
            check_lora(model, settings.lora)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class Gather(Protocol):
    """Turns tensors, which may be sharded, into full tensors in the same order, or into no tensors at all.

    `dtype`: dtype of the full tensors; None: their own.
    """

    def __call__(self, tensors: Iterable[Named], dtype: torch.dtype | None = None) -> Iterable[Named]: ...


def published_weights(policy: PackedPolicy, dtype: torch.dtype, gather: Gather = full_tensors) -> Iterator[Named]:
    """Yield the weights of the policy in a dtype, by the engines' names, always in the same order.

    Weights are cast before they are gathered. With an adapter they are cast after the merge, which is in float32;
    the base weights, almost all bytes, are stored in the dtype of the forward pass.
    """
    if has_adapter(policy.model):
        for name, tensor in merged_weights(policy.model, gather):
            yield name, tensor.to(dtype)
    else:
        yield from gather(weights_of(policy.model).items(), dtype)


def published_specs(policy: PackedPolicy, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Specs of `published_weights`."""

    def shapes(tensors: Iterable[Named], dtype: torch.dtype | None = None) -> Iterator[Named]:
        for name, tensor in tensors:
            yield name, torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")

    return specs_of(dict(published_weights(policy, dtype, shapes)))
