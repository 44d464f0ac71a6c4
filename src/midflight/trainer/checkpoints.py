"""Checkpoints: `checkpoints/step_N`, complete or not there at all.

A checkpoint is written beside its place, synced and renamed, so a crash or a full disk leaves the older ones alone. It
holds a hash of each of its files: what a disk or a copy damaged later is noticed, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from midflight.errors import CheckpointError
from midflight.trainer.state import TrainerState

_STATE_FILE = "trainer_state.json"
_HASHES_FILE = "hashes.json"  # path in the checkpoint -> SHA-256
_UNFINISHED = ".unfinished-"
_DAMAGED = "damaged_"


def save_checkpoint(directory: Path, state: TrainerState, save_weights: Callable[[Path], None], keep: int) -> Path:
    """Write `step_N`, then delete all but the newest `keep`.

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
    # safetensors and torch.save report a full disk with exceptions of their own.
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        kept = newest_checkpoint(directory)
        raise CheckpointError(
            f"checkpoint {target.name} could not be written ({_first_line(error)});"
            f" {f'{kept.name} is kept' if kept else 'there is no older one'}"
        ) from error
    for old in checkpoints_in(directory)[:-keep]:
        shutil.rmtree(old)
    return target


def checkpoint_of(directory: Path, version: int) -> Path:
    """Where it is, if there is one."""
    return directory / f"step_{version}"


def checkpoints_in(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(directory.glob("step_*"), key=_version)


def newest_checkpoint(directory: Path) -> Path | None:
    checkpoints = checkpoints_in(directory)
    return checkpoints[-1] if checkpoints else None


def newest_whole_checkpoint(directory: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are what was written; None if there is no checkpoint at all.

    Damaged ones that are newer are renamed, so that nobody takes them for checkpoints again, and reported.
    Raises: CheckpointError if all there are are damaged.
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
        raise CheckpointError(f"no checkpoint in {directory} is whole; in {newest.name}, the newest, {damage}")
    for path, damage in damaged.items():
        aside = path.with_name(_DAMAGED + path.name)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        report(f"{path.name} is damaged and not used, as {damage}; training goes on from {checkpoint.name}")
    return checkpoint


def oldest_checkpoint_version(directory: Path) -> int:
    """Raises: IndexError if there is no checkpoint."""
    return _version(checkpoints_in(directory)[0])


def load_state(checkpoint: Path) -> TrainerState:
    """Raises: CheckpointError if the file is missing or damaged."""
    try:
        return TrainerState.from_json((checkpoint / _STATE_FILE).read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint / _STATE_FILE} cannot be read: {_first_line(error)}") from error


def _version(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with it; None if nothing is."""
    try:
        expected = json.loads((checkpoint / _HASHES_FILE).read_text())
        found = _hashes(checkpoint)
    except (OSError, ValueError) as error:
        return _first_line(error)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return f"{name} is not what was written" if name in found else f"{name} is missing"
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
