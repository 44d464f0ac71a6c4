"""Recipe -> how the trainer's weights get to the process that generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.launch.importing import Joint, options_of
from midflight.protocols import WeightTransport

TRANSPORTS: Joint[WeightTransport] = Joint(
    "weights.type",
    {
        "shared_memory": "midflight.weights.shared_memory:SharedMemoryTransport",
        "files": "midflight.weights.files:FileTransport",
    },
    WeightTransport,
)


def build_transport(recipe: Recipe, run: RunDirectory, shared: Path, note: Callable[[str], object]) -> WeightTransport:
    """`shared`: a path in the memory of this machine. `note` is for the user.

    Raises: RecipeError if the user's own cannot be used.
    """
    offered = _offered(run, shared, note)
    return TRANSPORTS.make(recipe.weights.type, offered, options_of(recipe.weights))


def check_weights(recipe: Recipe) -> None:
    """Raises: RecipeError if the user's own transport cannot be used."""
    offered = _offered(RunDirectory(Path()), Path(), str)
    TRANSPORTS.bind(recipe.weights.type, offered, options_of(recipe.weights))


def _offered(run: RunDirectory, shared: Path, note: Callable[[str], object]) -> dict[str, Any]:
    return {"run_directory": run.path, "shared": shared, "spare": run.spare_weights, "note": note}
