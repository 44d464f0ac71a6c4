"""Named tensors in safetensors files of a bounded size, with the file names of transformers.

`STEM.safetensors`, or `STEM-00001-of-00003.safetensors` and so on with `STEM.safetensors.index.json` beside them.
"""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from midflight.errors import CheckpointError
from midflight.trainer.full_tensors import local, local_rows
from midflight.types import TensorSpec
from midflight.weights.specs import num_bytes

# Stems of the safetensors files in a checkpoint. The masters are float32 parameters, saved if the model is rounded.
MODEL, MASTERS, OPTIMIZER, VALUE_HEAD, PROXIMAL = "model", "masters", "optimizer", "value_head", "proximal"

FILE_BYTES = 512 << 20


def save_tensors(
    directory: Path,
    stem: str,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the tensors described by `specs`. At most one file, plus one larger tensor, is in memory at a time."""
    split = split_state_dict_into_shards_factory(
        {spec.name: spec for spec in specs},
        get_storage_size=num_bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=file_bytes,
    )
    contents: dict[str, dict[str, Tensor]] = {file_name: {} for file_name in split.filename_to_tensors}
    for name, tensor in tensors:
        file_name = split.tensor_to_filename[name]
        saved = tensor.detach().cpu()
        # A copy of a view, so that it does not keep the whole storage in memory; safetensors saves no shared storage.
        contents[file_name][name] = saved if saved.untyped_storage().nbytes() == saved.nbytes else saved.clone()
        if len(contents[file_name]) == len(split.filename_to_tensors[file_name]):
            save_file(contents.pop(file_name), directory / file_name, metadata={"format": "pt"})
    assert not contents, f"tensors of {', '.join(contents)} are missing"
    if not specs:
        save_file({}, directory / f"{stem}.safetensors", metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def save_on_first_rank(
    rank: int,
    directory: Path,
    stem: str,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Save tensors on rank 0; all other ranks iterate over `tensors` too, because gathering is a collective."""
    if rank == 0:
        save_tensors(directory, stem, specs, tensors, file_bytes)
    else:
        collections.deque(tensors, maxlen=0)


def stem_of_masters(checkpoint: Path) -> str:
    """Return the stem of the files with float32 parameters: the masters if there are any, else the model."""
    return MASTERS if any(checkpoint.glob(f"{MASTERS}*")) else MODEL


class SavedTensors:
    """Reader of the tensors saved under one stem; a context manager.

    Raises: CheckpointError if a file cannot be read.
    """

    def __init__(self, directory: Path, stem: str) -> None:
        self._directory = directory
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        index = directory / f"{stem}.safetensors.index.json"
        try:
            names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
            for name in sorted(names or {f"{stem}.safetensors"}):
                file = self._open.enter_context(safe_open(directory / name, framework="pt"))
                self._files |= dict.fromkeys(file.keys(), file)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            self._open.close()
            raise CheckpointError(f"the {stem} tensors in {directory} cannot be read: {error}") from error

    @property
    def names(self) -> Set[str]:
        return self._files.keys()

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    @torch.no_grad()
    def fill(self, target: Tensor, name: str) -> None:
        """Copy a saved tensor into `target`; if `target` is sharded, copy this rank's rows.

        Raises: CheckpointError if the tensor is missing or has another shape.
        """
        if name not in self._files:
            raise CheckpointError(f"{self._directory} has no tensor {name}")
        saved, rows = self._files[name].get_slice(name), local_rows(target)
        if (shape := tuple(saved.get_shape())) != target.shape:
            raise CheckpointError(f"{name} in {self._directory} has shape {list(shape)}, not {list(target.shape)}")
        if rows is None:
            target.copy_(self.read(name))
        elif rows.start < rows.stop:
            local(target).copy_(saved[rows])

    def __enter__(self) -> SavedTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()
