"""Recipe -> the transport of weights from the trainer to the rollout process."""

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
    """Return the transport; `shared` is a path in shared memory, `note` shows the user a line.

    Raises: RecipeError if the user's own transport cannot be used.
    """
    offered = _offered(run, shared, note)
    return TRANSPORTS.make(recipe.weights.type, offered, options_of(recipe.weights))


def check_weights(recipe: Recipe) -> None:
    """Check the recipe's transport. Raises: RecipeError if the user's own transport cannot be used."""
    offered = _offered(RunDirectory(Path()), Path(), str)
    TRANSPORTS.bind(recipe.weights.type, offered, options_of(recipe.weights))


def _offered(run: RunDirectory, shared: Path, note: Callable[[str], object]) -> dict[str, Any]:
    return {"run_directory": run.path, "shared": shared, "spare": run.spare_weights, "note": note}
