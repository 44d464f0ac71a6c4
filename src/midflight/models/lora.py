"""LoRA: trains B [out, rank] and A [rank, in] in place of a weight matrix W [out, in]; uses W + scale * B @ A.

The layers come from peft. Their parameters are named `LAYER.base_layer.weight` (frozen), `LAYER.lora_A.default.weight`
and `LAYER.lora_B.default.weight`.

Source: Hu et al. 2021, LoRA.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from midflight.errors import MissingExtraError, RecipeError
from midflight.models.loading import Named, weights_of

_BASE, _ADAPTER = ".base_layer.", ".lora_"
# Names defined by peft: its files, and the prefix that a PeftModel puts before the model's names.
ADAPTER_STEM = "adapter_model"
_CONFIG_FILE, _PEFT_PREFIX = "adapter_config.json", "base_model.model."


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Settings of an adapter.

    `targets`: last parts of the names of linear layers; None: all linear layers except the output head.
    """

    rank: int
    alpha: float  # scale = alpha / rank
    targets: tuple[str, ...] | None = None


def check_lora(model: Any, settings: LoraSettings) -> None:
    """Check that an adapter fits the model.

    Raises: RecipeError if a target is no linear layer of the model; MissingExtraError without the package peft.
    """
    _import_peft()
    _targets(model, settings)


def adapter_size(model: Any, settings: LoraSettings) -> int:
    """Number of parameters of an adapter. Raises: as `check_lora`."""
    _import_peft()
    targets = _targets(model, settings)
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2] in targets]
    return sum(settings.rank * sum(layer.weight.shape) for layer in layers)


def add_adapter(model: Any, settings: LoraSettings, base: Path) -> None:
    """Add an adapter to every target, initially without effect, and freeze all other parameters.

    The adapter is float32 and initialized even if the model is on the meta device. A is random, with the same values in
    every process.

    `base`: path of the model, stored for users who load the adapter alone.
    Raises: as `check_lora`.
    """
    peft = _import_peft()
    targets = _targets(model, settings)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=sorted(targets),
        fan_in_fan_out=all(isinstance(layer, Conv1D) for layer in targets.values()),
        base_model_name_or_path=str(base),
        task_type="CAUSAL_LM",
        inference_mode=False,
    )
    peft.inject_adapter_in_model(config, model)
    generator = torch.Generator().manual_seed(0)
    for layer in [module for module in model.modules() if hasattr(module, "lora_A")]:
        (a,), (b,) = layer.lora_A.values(), layer.lora_B.values()
        a.weight, b.weight = (nn.Parameter(torch.zeros(matrix.weight.shape)) for matrix in (a, b))
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5), generator=generator)


def has_adapter(model: nn.Module) -> bool:
    return bool(adapter_weights(model))


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters of the adapter, by their names in peft's files."""
    return {
        _PEFT_PREFIX + name.replace(".default.weight", ".weight"): tensor
        for name, tensor in weights_of(model).items()
        if _ADAPTER in name
    }


def save_adapter_config(model: Any, directory: Path) -> None:
    """Save the configuration that `PeftModel.from_pretrained(base_model, directory)` reads besides weights."""
    config = {**model.peft_config["default"].to_dict(), "inference_mode": True}
    text = json.dumps(config, indent=2, sort_keys=True, default=sorted)  # sets are not JSON
    (directory / _CONFIG_FILE).write_text(text)


def base_name(name: str) -> str | None:
    """Name of a parameter in the model without adapters; None for a parameter of an adapter."""
    return None if _ADAPTER in name else name.replace(_BASE, ".")


def merged_weights(model: nn.Module, gather: Callable[[Iterable[Named]], Iterable[Named]] = iter) -> Iterator[Named]:
    """Yield the weights of the equivalent model without adapters, by its names, one tensor at a time.

    The base weights do not change. Sums are computed in float32.

    `gather`: turns parameters, which may be sharded, into full tensors in the same order, or into no tensors at all.
    """
    # The parameters of a layer come in this order: its own, then A, then B.
    held: dict[str, Tensor] = {}
    for name, tensor in gather(weights_of(model).items()):
        if _BASE in name:
            held[name.rpartition(".")[2]] = tensor
        elif f"{_ADAPTER}A" in name:
            a = tensor
        elif f"{_ADAPTER}B" in name:
            layer_name = name.partition(_ADAPTER)[0]
            held["weight"] = _merged(model.get_submodule(layer_name), held["weight"], a, tensor)
            yield from ((f"{layer_name}.{kind}", parameter) for kind, parameter in held.items())
            held = {}
        else:
            yield name, tensor


def _merged(layer: Any, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    change: Tensor = (b @ a).mul_(layer.scaling["default"])
    # In place, so that there is one float32 matrix instead of four.
    return (change.t().contiguous() if layer.fan_in_fan_out else change).add_(base)


def _targets(model: Any, settings: LoraSettings) -> dict[str, nn.Module]:
    """Linear layers that get an adapter, by the last part of their names."""
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    unknown = [name for name in settings.targets or () if name not in linear]
    if unknown:
        raise RecipeError(
            f"trainer.lora_targets: the model has no linear layers {', '.join(unknown)};"
            f" choose from {', '.join(linear)}"
        )
    return {name: linear[name] for name in settings.targets or linear}


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("peft", "lora") from error
    return peft
