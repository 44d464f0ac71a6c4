"""Registration of a server with a run: its entry in the run's registry, RUN/engines."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import httpx

from midflight.config import load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import RecipeError, RunDirectoryError
from midflight.launch.weights import build_transport
from midflight.protocols import WeightReceiver
from midflight.run.directory import write_atomically

_ANY_ADDRESS = ("0.0.0.0", "::")


class Registration:
    """The registration of one server with a run.

    Raises: RunDirectoryError if the directory holds no run; RecipeError if the run does not use servers.
    """

    def __init__(self, run_directory: Path) -> None:
        run = RunDirectory(run_directory.resolve())
        if not run.config.is_file():
            raise RunDirectoryError(
                f"--join {run_directory}: the directory holds no run; start one with `midflight train RECIPE"
                f" engine.type=http run.directory={run_directory}`"
            )
        self._run, self._recipe = run, load_recipe(run.config)
        if self._recipe.engine.type != "http":
            raise RecipeError(
                f"--join {run_directory}: the run has an engine of its own; engine.type = 'http' would work"
            )
        self._directory = run.engines
        self._file: Path | None = None

    def receiver(self) -> WeightReceiver | None:
        """Return the end of the run's weight transport for this server; None if the trainer sends to servers."""
        return build_transport(self._recipe, self._run, self._run.path, "", str).receiver()

    def enter(self, url: str) -> None:
        """Register this server as ready. If it listens on all addresses, its host name is registered."""
        parsed = httpx.URL(url)
        if parsed.host in _ANY_ADDRESS:
            parsed = parsed.copy_with(host=socket.gethostname())
        name = re.sub(r"[^\w.-]+", "-", f"{parsed.host}-{parsed.port}")
        try:
            self._directory.mkdir(exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"cannot write to {self._directory}: {error.strerror}") from error
        self._file = self._directory / f"{name}.json"
        write_atomically(self._file, json.dumps({"url": str(parsed)}) + "\n")

    def withdraw(self) -> None:
        """Remove this server from the registry."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
