"""Training runs as a benchmark makes them: each in a process of its own, nothing drawn."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from midflight.errors import WorkerError
from midflight.run.directory import create_directory


@contextlib.contextmanager
def kept_in(directory: Path | None) -> Iterator[Path]:
    """Where runs are left: `directory`, new or empty, or if that is None one that is gone at the end.

    Raises: RunDirectoryError if it holds something or cannot be written.
    """
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="midflight-runs-") as temporary:
            yield Path(temporary)
        return
    create_directory(directory)
    yield directory.resolve()


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
