"""LoRA: instead of a weight matrix W [out, in], B [out, rank] and A [rank, in] are trained; W + scale * B @ A is used.

The layers are peft's. Their parameters have the names `LAYER.base_layer.weight` (frozen), `LAYER.lora_A.default.weight`
and `LAYER.lora_B.default.weight`.

Source: Hu et al. 2021, LoRA.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from midflight.errors import MissingExtraError, RecipeError

_BASE, _ADAPTER = ".base_layer.", ".lora_"
# peft's own names, of files and of what a PeftModel puts before the model's names.
_WEIGHTS_FILE, _CONFIG_FILE, _PEFT_PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """`targets`: last parts of the names of linear layers; None: all but the output head."""

    rank: int
    alpha: float  # scale = alpha / rank
    targets: tuple[str, ...] | None = None


def check_lora(model: Any, settings: LoraSettings) -> None:
    """Raises: RecipeError if a target is no linear layer of the model's; MissingExtraError without the package peft."""
    _import_peft()
    _targets(model, settings)


def add_adapter(model: Any, settings: LoraSettings, base: Path) -> None:
    """Put an adapter that changes nothing yet beside every target, and freeze everything else.

    A is random, the same in every process. `base`: where the model is from, for those who load the adapter alone.
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if _ADAPTER in name:
            parameter.data = parameter.data.float()


def has_adapter(model: nn.Module) -> bool:
    return bool(_adapter(model))


def merged_weights(model: nn.Module, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model that computes the same without adapters, under its names, one after another.

    The base weights themselves stay as they are. What is added to them is added in float32. `whole` makes a tensor out
    of a parameter, which may be a shard.
    """
    for name, parameter in model.named_parameters():
        layer_name, is_base, kind = name.rpartition(_BASE)
        if is_base and kind == "weight":
            yield f"{layer_name}.{kind}", _merged(model.get_submodule(layer_name), whole(parameter), whole)
        elif is_base:
            yield f"{layer_name}.{kind}", whole(parameter)
        elif _ADAPTER not in name:
            yield name, whole(parameter)


def save_adapter(model: Any, directory: Path, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> None:
    """peft's files, as `PeftModel.from_pretrained(base_model, directory)` reads them."""
    directory.mkdir()
    weights = {_name_in_file(name): whole(parameter).contiguous() for name, parameter in _adapter(model).items()}
    save_file(weights, directory / _WEIGHTS_FILE)
    config = {**model.peft_config["default"].to_dict(), "inference_mode": True}
    text = json.dumps(config, indent=2, sort_keys=True, default=sorted)  # sets are not JSON
    (directory / _CONFIG_FILE).write_text(text)


def load_adapter(directory: Path) -> dict[str, Tensor]:
    """What `save_adapter` wrote, under the names of the model's parameters."""
    suffix = ".weight"
    return {
        f"{name.removeprefix(_PEFT_PREFIX).removesuffix(suffix)}.default{suffix}": tensor
        for name, tensor in load_file(directory / _WEIGHTS_FILE).items()
    }


def _merged(layer: Any, base: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
    (a,), (b,) = layer.lora_A.values(), layer.lora_B.values()
    change: Tensor = whole(b.weight) @ whole(a.weight) * layer.scaling["default"]
    return base.to(change.dtype) + (change.t() if layer.fan_in_fan_out else change)


def _adapter(model: nn.Module) -> Mapping[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if _ADAPTER in name}


def _name_in_file(name: str) -> str:
    return _PEFT_PREFIX + name.replace(".default.weight", ".weight")


def _targets(model: Any, settings: LoraSettings) -> dict[str, nn.Module]:
    """The linear layers that get an adapter, by the last part of their names."""
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    unknown = [name for name in settings.targets or () if name not in linear]
    if unknown:
        raise RecipeError(
            f"trainer.lora_targets: the model has no linear layers {', '.join(unknown)}; it has {', '.join(linear)}"
        )
    return {name: linear[name] for name in settings.targets or linear}


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("peft", "lora") from error
    return peft
