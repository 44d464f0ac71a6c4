"""Named tensors in safetensors files of a bounded size, as transformers names and finds them.

`STEM.safetensors`, or `STEM-00001-of-00003.safetensors` and so on with `STEM.safetensors.index.json` beside them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from midflight.errors import CheckpointError
from midflight.trainer.shards import local, local_rows
from midflight.types import TensorSpec
from midflight.weights.slot_file import DTYPES

# What a checkpoint is made of: the stems of its safetensors files.
MODEL, OPTIMIZER, VALUE_HEAD, PROXIMAL = "model", "optimizer", "value_head", "proximal"

FILE_BYTES = 512 << 20


def save_tensors(
    directory: Path,
    stem: str,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `tensors`, which are as `specs` say, in this order. In memory at a time: what one file holds."""
    files = _files(specs, file_bytes)
    names = [
        f"{stem}-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else f"{stem}.safetensors"
        for number in range(1, len(files) + 1)
    ]
    remaining = iter(tensors)
    for file_name, members in zip(names, files, strict=True):
        # A copy on the host, so that the parts of a bucket do not keep all of it.
        content = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _take(remaining, members)}
        save_file(content, directory / file_name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {spec.name: name for name, members in zip(names, files, strict=True) for spec in members}
        index = {"metadata": {"total_size": sum(map(_num_bytes, specs))}, "weight_map": weight_map}
        (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def save_on_first_rank(
    rank: int,
    directory: Path,
    stem: str,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    file_bytes: int = FILE_BYTES,
) -> None:
    """`save_tensors` on rank 0; the others go through `tensors`, which are gathered for it."""
    if rank == 0:
        save_tensors(directory, stem, specs, tensors, file_bytes)
    else:
        collections.deque(tensors, maxlen=0)


def _files(specs: Sequence[TensorSpec], file_bytes: int) -> list[list[TensorSpec]]:
    files: list[list[TensorSpec]] = [[]]
    room = file_bytes
    for spec in specs:
        if files[-1] and _num_bytes(spec) > room:
            files.append([])
            room = file_bytes
        files[-1].append(spec)
        room -= _num_bytes(spec)
    return files


def _num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def _take(tensors: Iterator[tuple[str, Tensor]], members: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    for spec in members:
        name, tensor = next(tensors)
        assert name == spec.name, f"{name} stands where {spec.name} should"
        yield name, tensor


class SavedTensors:
    """Reads them. A context manager.

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
        """Copy a tensor; of one that is sharded, this rank's rows.

        Raises: CheckpointError if it is not there or has another shape.
        """
        if name not in self._files:
            raise CheckpointError(f"{self._directory} holds no {name}")
        saved, rows = self._files[name].get_slice(name), local_rows(target)
        if (shape := tuple(saved.get_shape())) != target.shape:
            raise CheckpointError(f"{name} in {self._directory} is {list(shape)}, not {list(target.shape)}")
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
