"""Training runs of comparisons and calibrations: each in a process of its own, nothing drawn."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midflight.errors import RecipeError, WorkerError

ENDLESS = 1_000_000_000  # optimizer steps, or checkpoints: the clock ends a run

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunLength:
    """When a run ends: after so many seconds of training or optimizer steps, whichever is not None."""

    seconds: float | None = None
    steps: int | None = None

    def check(self) -> None:
        """Raises: RecipeError if no run has that length."""
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise RecipeError(f"--seconds: should be greater than 0, got {self.seconds:g}")
        if self.steps is not None and self.steps < 1:
            raise RecipeError(f"--steps: should be at least 1, got {self.steps}")

    @property
    def overrides(self) -> list[str]:
        if self.steps is not None:
            return [f"trainer.max_steps={self.steps}"]
        return [f"trainer.max_steps={ENDLESS}", f"trainer.max_seconds={self.seconds}"]


def check_overrides(overrides: Sequence[str], ours: Mapping[str, str], noun: str) -> None:
    """Raises: RecipeError for a key that an option decides about; `ours`: keys and their options."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in ours:
            raise RecipeError(f"override {override}: in a {noun} {ours[key]} decides about {key}")


def train(recipe: Path, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The summary of one run, in a process of its own so that runs do not warm each other up.

    Raises: WorkerError with what the run said, if it failed.
    """
    command = [sys.executable, "-m", "midflight", "train", str(recipe), f"run.directory={directory}", "--json"]
    process = subprocess.run([*command, *overrides], capture_output=True, text=True)
    if process.returncode:
        said = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise WorkerError(f"the run in {directory} failed: {said[-1].removeprefix('midflight: ')}")
    summary: dict[str, Any] = json.loads(process.stdout)
    return summary
