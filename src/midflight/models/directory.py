"""Files of a model directory, read without torch: the process that supervises a run never imports it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from midflight.errors import ModelError


def check_same_model(checkpoint: Path, path: Path) -> None:
    """Check that a checkpoint fits the model in `path`, without reading weights.

    Raises: ModelError naming the difference in model type or shape.
    """
    found, expected = _model_type(checkpoint), _model_type(path)
    if found != expected:
        raise ModelError(
            f"{checkpoint} is of another model: its type is {found}, but model.path = {path} is {expected}"
        )
    found_shapes, expected_shapes = _shapes(checkpoint), _shapes(path)
    for name in sorted(found_shapes.keys() & expected_shapes.keys()):
        if found_shapes[name] != expected_shapes[name]:
            raise ModelError(
                f"{checkpoint} is of another model: its {name} is {found_shapes[name]}, but in model.path = {path}"
                f" it is {expected_shapes[name]}"
            )


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the errors of reading a model directory into a ModelError."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error


def _model_type(directory: Path) -> str:
    with readable(directory):
        name: str = json.loads((directory / "config.json").read_text())["model_type"]
    return name


def _shapes(directory: Path) -> dict[str, list[int]]:
    """Shapes of all tensors in the model's files, by name."""
    shapes = {}
    for file in directory.glob("model*.safetensors"):
        with readable(directory), safe_open(file, framework="numpy") as tensors:
            shapes.update({name: tensors.get_slice(name).get_shape() for name in tensors.keys()})  # noqa: SIM118
    return shapes
