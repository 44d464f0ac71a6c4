"""Checkpoints: `checkpoints/step_N`, complete or not there at all.

A checkpoint is written beside its place, synced and renamed, so a crash or a full disk leaves the older ones alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from midflight.errors import CheckpointError

_STATE_FILE = "trainer_state.json"
_UNFINISHED = ".unfinished-"
_HISTOGRAMS = ("lag_histogram", "generated_lengths", "trained_lengths", "dropped_lengths")  # JSON keys are strings


@dataclass(slots=True)
class TrainerState:
    """What the trainer counts over a whole run, interruptions included."""

    version: int = 0  # optimizer steps; also the offset of the next batch
    samples: int = 0  # rollouts trained on
    trained_tokens: int = 0  # response tokens of those
    trained_groups: int = 0
    skipped_steps: int = 0
    wall_s: float = 0.0
    lag_histogram: dict[int, int] = field(default_factory=dict)  # optimizer steps -> response tokens
    ess_sum: float = 0.0
    ess_steps: int = 0
    versions_per_rollout_max: int = 0
    rollout_s: float = 0.0  # seconds that generation was not waiting for training
    carried_tokens: float = 0.0  # trained tokens of rollouts that were interrupted, from before that
    # Response length in tokens -> rollouts:
    generated_lengths: dict[int, int] = field(default_factory=dict)
    trained_lengths: dict[int, int] = field(default_factory=dict)
    dropped_lengths: dict[int, int] = field(default_factory=dict)


def save_checkpoint(directory: Path, state: TrainerState, save_weights: Callable[[Path], None], keep: int) -> Path:
    """Write `step_N`, then delete all but the newest `keep`.

    Raises: CheckpointError if it cannot be written; older checkpoints are untouched.
    """
    target = directory / f"step_{state.version}"
    if target.exists():
        return target
    unfinished = directory / f"{_UNFINISHED}{target.name}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_weights(unfinished)
        (unfinished / _STATE_FILE).write_text(json.dumps(asdict(state)))
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


def checkpoints_in(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(directory.glob("step_*"), key=_version)


def newest_checkpoint(directory: Path) -> Path | None:
    checkpoints = checkpoints_in(directory)
    return checkpoints[-1] if checkpoints else None


def oldest_checkpoint_version(directory: Path) -> int:
    """Raises: IndexError if there is no checkpoint."""
    return _version(checkpoints_in(directory)[0])


def load_state(checkpoint: Path) -> TrainerState:
    """Raises: CheckpointError if the file is missing or damaged."""
    try:
        values = json.loads((checkpoint / _STATE_FILE).read_text())
        for name in _HISTOGRAMS:
            values[name] = {int(key): count for key, count in values[name].items()}
        return TrainerState(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint / _STATE_FILE} cannot be read: {_first_line(error)}") from error


def _version(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _sync(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
