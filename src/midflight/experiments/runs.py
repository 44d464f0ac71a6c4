"""Training runs for comparisons and calibrations, each in a process of its own, without a live view."""

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

ENDLESS = 1_000_000_000  # number of optimizer steps or checkpoints that no run reaches
# Overrides of runs whose speed is compared: an evaluation would take time from them.
NO_EVALUATION = ("eval.num_problems=0", "eval.sets=[]")

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunLength:
    """Length of a run: either seconds of training or optimizer steps; the other one is None."""

    seconds: float | None = None
    steps: int | None = None

    def check(self) -> None:
        """Check the length. Raises: RecipeError if it is not positive."""
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise RecipeError(f"--seconds: should be greater than 0, got {self.seconds:g}")
        if self.steps is not None and self.steps < 1:
            raise RecipeError(f"--steps: should be at least 1, got {self.steps}")

    @property
    def overrides(self) -> list[str]:
        if self.steps is not None:
            return [f"trainer.max_steps={self.steps}"]
        return [f"trainer.max_steps={ENDLESS}", f"trainer.max_seconds={self.seconds}"]


def check_overrides(overrides: Sequence[str], options: Mapping[str, str], noun: str) -> None:
    """Check that no override sets a key of `options`, which maps keys to the command-line options that set them.

    Raises: RecipeError for such an override.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in options:
            raise RecipeError(f"override {override}: in a {noun}, {options[key]} sets {key}; leave the override out")


def train(recipe: Path, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run one training and return its summary. Each run has its own process, so that runs do not warm each other up.

    Raises: WorkerError with the last line of the run's errors, if it failed.
    """
    command = [sys.executable, "-m", "midflight", "train", str(recipe), f"run.directory={directory}", "--json"]
    process = subprocess.run([*command, *overrides], capture_output=True, text=True)
    if process.returncode:
        errors = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise WorkerError(f"the run in {directory} failed: {errors[-1].removeprefix('midflight: ')}")
    summary: dict[str, Any] = json.loads(process.stdout)
    return summary
