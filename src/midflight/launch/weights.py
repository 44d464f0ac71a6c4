"""Recipe -> how the trainer's weights get to the process that generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.weights.files import FileReceiver, FileSender
from midflight.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender


def open_sender(
    recipe: Recipe, run: RunDirectory, shared: Path, note: Callable[[str], object]
) -> SharedMemorySender | FileSender:
    """`shared`: a path in the memory of this machine. `note` is for the user."""
    if recipe.weights.type == "files":
        return FileSender(_directory(recipe, run))
    return SharedMemorySender(shared, run.spare_weights, note)


def open_receiver(recipe: Recipe, run: RunDirectory, shared: Path) -> SharedMemoryReceiver | FileReceiver:
    if recipe.weights.type == "files":
        return FileReceiver(_directory(recipe, run))
    return SharedMemoryReceiver(shared)


def _directory(recipe: Recipe, run: RunDirectory) -> Path:
    return recipe.weights.directory or run.path / "weights"
