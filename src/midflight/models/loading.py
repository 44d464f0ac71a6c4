"""Loading of models and tokenizers from Hugging Face directories, without downloads."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from midflight.errors import ModelError
from midflight.models.attention import register_packed_attention
from midflight.models.directory import readable
from midflight.models.prompts import PromptFormat
from midflight.models.tokenizer import Tokenizer

Named = tuple[str, Tensor]


def check_model_directory(path: Path, key: str = "model.path") -> None:
    """Check that a model directory has the files that every model needs, without reading weights.

    `key`: recipe key of the path, for messages.
    Raises: ModelError if the directory or a file is missing.
    """
    if not path.is_dir():
        # The shipped recipes of SmolLM2 name the directory that this command makes.
        is_smollm2 = path.name.startswith("smollm2-135m-instruct")
        hint = "; `python -m midflight.models.smollm2` makes it" if is_smollm2 else ""
        raise ModelError(f"{key}: there is no directory {path}{hint}")
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ModelError(f"{key}: {path} has no {', no '.join(missing)}")


def load_config(path: Path) -> Any:
    with readable(path):
        return AutoConfig.from_pretrained(path, local_files_only=True)


def stored_dtype(path: Path) -> torch.dtype:
    """Return bfloat16 if a model directory names this dtype, else float32. Raises: ModelError."""
    return torch.bfloat16 if load_config(path).dtype == torch.bfloat16 else torch.float32


def load_tokenizer(path: Path) -> Tokenizer:
    with readable(path):
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return tokenizer


def stop_token_ids(path: Path, prompts: PromptFormat) -> tuple[int, ...]:
    """Return the tokens that end a response.

    These are the tokenizer's EOS token, the tokens listed in the model directory, and the special token that the chat
    template writes after an answer. Chat models list several tokens in generation_config.json, such as the end of a
    turn and the end of a text. The chat template of a base model can end turns with a token that the model does not
    list.
    Raises: ModelError if a file cannot be read.
    """
    listed = [prompts.tokenizer.eos_token_id]
    # Read the files directly: transformers would insert a default if config.json names no EOS token.
    for file in (path / "generation_config.json", path / "config.json"):
        if file.is_file():
            with readable(file):
                value = json.loads(file.read_text()).get("eos_token_id")
            listed += value if isinstance(value, list) else [value]
    listed.append(prompts.end_of_turn)
    vocab_size = load_config(path).vocab_size
    return tuple(dict.fromkeys(token for token in listed if token is not None and 0 <= token < vocab_size))


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Load a model with packed attention, in evaluation mode (no dropout: engine and trainer must agree)."""
    with readable(path), quiet():
        model = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=dtype, attn_implementation=register_packed_attention()
        )
    return model.eval()  # type: ignore[no-any-return]


def save_description(model: Any, tokenizer: Tokenizer, directory: Path, dtype: torch.dtype) -> None:
    """Save the files that `from_pretrained` reads besides weights; `dtype`: dtype of the saved weights."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    for described in (config, model.generation_config, tokenizer):
        described.save_pretrained(directory)


def load_skeleton(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Build the model on the meta device, without memory for weights: only its modules and their names."""
    with readable(path), torch.device("meta"):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=register_packed_attention())


def empty_model(path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Build the model of `load_model`, but with all tensors of its files on the meta device."""
    model = load_skeleton(path, dtype)
    if (path / "generation_config.json").is_file():
        with readable(path):
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    in_files = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in in_files:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    # As in from_pretrained: marked tensors stay as they are; modules initialize all other tensors.
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()
    return model.eval()  # type: ignore[no-any-return]


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by the names that engines use; tied parameters appear once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def saved_tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Tensors of the model's files by name: the weights and the buffers saved with them."""
    return weights_of(model) | saved_buffers_of(model)


def saved_buffers_of(model: torch.nn.Module) -> dict[str, Tensor]:
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable the progress bars of transformers, which appear even for the smallest model."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
