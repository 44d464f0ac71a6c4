"""Checkpoints in `checkpoints/step_N`, complete or absent.

A checkpoint is written under a temporary name, synced and renamed, so a crash or a full disk leaves older checkpoints
intact. It contains a hash of each of its files. If a disk or a copy damages a checkpoint later, the damage is detected
and the previous checkpoint is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from midflight.errors import CheckpointError
from midflight.trainer.state import TrainerState

_STATE_FILE = "trainer_state.json"
_HASHES_FILE = "hashes.json"  # maps each path in the checkpoint to its SHA-256
_UNFINISHED = ".unfinished-"
_DAMAGED = "damaged_"


def save_checkpoint(
    directory: Path,
    state: TrainerState,
    save_weights: Callable[[Path], None],
    keep: int,
    also_keep: Collection[int] = (),
) -> Path:
    """Write `step_N`, then delete all but the newest `keep` and those of the versions `also_keep`.

    Raises: CheckpointError if it cannot be written; older checkpoints are untouched.
    """
    target = checkpoint_of(directory, state.version)
    unfinished = directory / f"{_UNFINISHED}{target.name}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_weights(unfinished)
        (unfinished / _STATE_FILE).write_text(state.to_json())
        (unfinished / _HASHES_FILE).write_text(json.dumps(_hashes(unfinished), indent=2))
        _sync(unfinished)
        unfinished.rename(target)
    # safetensors and torch.save raise their own exceptions for a full disk.
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        kept = newest_checkpoint(directory)
        raise CheckpointError(
            f"checkpoint {target.name} could not be written ({_first_line(error)});"
            f" {f'{kept.name} is kept' if kept else 'there is no older checkpoint'}"
        ) from error
    for old in checkpoints_in(directory)[:-keep]:
        if version_of(old) not in also_keep:
            shutil.rmtree(old)
    return target


def checkpoint_of(directory: Path, version: int) -> Path:
    """Path of the checkpoint of a version, which may not exist."""
    return directory / f"step_{version}"


def checkpoints_in(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(directory.glob("step_*"), key=version_of)


def newest_checkpoint(directory: Path) -> Path | None:
    checkpoints = checkpoints_in(directory)
    return checkpoints[-1] if checkpoints else None


def newest_whole_checkpoint(directory: Path, report: Callable[[str], None]) -> Path | None:
    """Return the newest undamaged checkpoint; None if there is no checkpoint.

    Newer, damaged checkpoints are reported, and renamed so that they no longer count as checkpoints.
    Raises: CheckpointError if all checkpoints are damaged.
    """
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(checkpoints_in(directory)):
        damage = _damage(checkpoint)
        if damage is None:
            break
        damaged[checkpoint] = damage
    else:
        if not damaged:
            return None
        newest, damage = next(iter(damaged.items()))
        raise CheckpointError(f"all checkpoints in {directory} are damaged; in {newest.name}, the newest, {damage}")
    for path, damage in damaged.items():
        aside = path.with_name(_DAMAGED + path.name)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        report(f"{path.name} is damaged and not used, as {damage}; training resumes from {checkpoint.name}")
    return checkpoint


def oldest_checkpoint_version(directory: Path, among: int) -> int:
    """Version of the oldest of the newest `among` checkpoints. Raises: IndexError if there is no checkpoint."""
    return version_of(checkpoints_in(directory)[-among:][0])


def load_state(checkpoint: Path) -> TrainerState:
    """Read the trainer's state. Raises: CheckpointError if the file is missing or damaged."""
    try:
        return TrainerState.from_json((checkpoint / _STATE_FILE).read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint / _STATE_FILE} cannot be read: {_first_line(error)}") from error


def version_of(checkpoint: Path) -> int:
    """Version of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step_"))


def _damage(checkpoint: Path) -> str | None:
    """Describe the damage of a checkpoint; None if it is intact."""
    try:
        expected = json.loads((checkpoint / _HASHES_FILE).read_text())
        actual = _hashes(checkpoint)
    except (OSError, ValueError) as error:
        return _first_line(error)
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            return f"{name} is not what was written" if name in actual else f"{name} is missing"
    return None


def _hashes(directory: Path) -> dict[str, str]:
    hashes = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != _HASHES_FILE:
            with path.open("rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _sync(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
