"""Registry of the servers that generate for a run: one file RUN/engines/NAME.json each, {"url": "http://..."}.

A server writes its file when it is ready and removes it when it stops; a killed server leaves its file behind. Files
written by hand work as well.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import httpx

from midflight.config import load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.errors import RecipeError, RunDirectoryError
from midflight.run.directory import write_atomically

_ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Entry:
    """A server in the registry. A restarted server writes its file again, so `written_at` changes."""

    url: str
    written_at: int  # modification time of the file (ns since the epoch)


def read_entries(directory: Path) -> dict[str, Entry | None]:
    """Return the servers by file name without suffix; None for a file without a valid entry."""
    entries: dict[str, Entry | None] = {}
    for path in sorted(directory.glob("*.json")):
        try:
            written_at = path.stat().st_mtime_ns
            entries[path.stem] = Entry(json.loads(path.read_text())["url"].rstrip("/"), written_at)
        except FileNotFoundError:  # removed since the directory was listed
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            entries[path.stem] = None
    return entries


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
        if load_recipe(run.config).engine.type != "http":
            raise RecipeError(
                f"--join {run_directory}: the run has an engine of its own; engine.type = 'http' would work"
            )
        self._directory = run.engines
        self._file: Path | None = None

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
