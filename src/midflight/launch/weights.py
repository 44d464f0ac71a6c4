"""Recipe -> the transport of weights from the trainer to the engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.config.sections import ProcessGroupWeightsConfig, SingleTrainerConfig
from midflight.generation.registry import Entry, read_entries
from midflight.launch.importing import Joint, options_of
from midflight.protocols import WeightTransport

TRANSPORTS: Joint[WeightTransport] = Joint(
    "weights.type",
    {
        "shared_memory": "midflight.weights.shared_memory:SharedMemoryTransport",
        "files": "midflight.weights.files:FileTransport",
        "process_group": "midflight.weights.process_group_transport:ProcessGroupTransport",
    },
    WeightTransport,
)


def build_transport(
    recipe: Recipe, run: RunDirectory, shared: Path, lineage: str, note: Callable[[str], object]
) -> WeightTransport:
    """Return the transport; `shared` is a path in shared memory, `note` shows the user a line.

    `lineage`: text that is new at every start of the run.
    Raises: RecipeError if the user's own transport cannot be used.
    """
    return TRANSPORTS.make(recipe.weights.type, _offered(recipe, run, shared, lineage, note), transport_options(recipe))


def check_weights(recipe: Recipe) -> None:
    """Check the recipe's transport. Raises: RecipeError if the user's own transport cannot be used."""
    offered = _offered(recipe, RunDirectory(Path()), Path(), "", str)
    TRANSPORTS.bind(recipe.weights.type, offered, transport_options(recipe))


def _offered(
    recipe: Recipe, run: RunDirectory, shared: Path, lineage: str, note: Callable[[str], object]
) -> dict[str, Any]:
    def engines() -> dict[str, Entry]:
        return {name: entry for name, entry in read_entries(run.engines).items() if entry is not None}

    return {
        "run_directory": run.path,
        "shared": shared,
        "spare": run.spare_weights,
        "engines": engines,
        "lineage": lineage,
        "device": recipe.trainer.device,
        "note": note,
    }


def transport_options(recipe: Recipe) -> dict[str, Any]:
    """Options of the transport, with the choices that the recipe leaves to its other sections."""
    weights, options = recipe.weights, options_of(recipe.weights)
    if isinstance(weights, ProcessGroupWeightsConfig):
        on_cuda = "cpu" not in (recipe.trainer.device, recipe.engine.device)
        if weights.backend == "auto":
            options["backend"] = "nccl" if on_cuda else "tcp"
        if weights.snapshot is None:
            options["snapshot"] = isinstance(recipe.trainer, SingleTrainerConfig)
    return options
