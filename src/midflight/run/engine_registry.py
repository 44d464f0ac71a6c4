"""RUN/engines: which servers generate for a run. Each has a file NAME.json there, {"url": "http://..."}.

A server writes its file when it is ready and removes it when it stops; one that was killed leaves it behind. Files that
people write do as well.
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
from midflight.run.directory import write_whole

_ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Entry:
    """`written_at`: when the file was; the same server started again has written another."""

    url: str
    written_at: int  # ns


def read_entries(directory: Path) -> dict[str, Entry | None]:
    """The servers by the names of their files; None for a file that names none."""
    entries: dict[str, Entry | None] = {}
    for path in sorted(directory.glob("*.json")):
        try:
            written_at = path.stat().st_mtime_ns
            entries[path.stem] = Entry(json.loads(path.read_text())["url"].rstrip("/"), written_at)
        except FileNotFoundError:  # removed this moment
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            entries[path.stem] = None
    return entries


class Registration:
    """A server's end.

    Raises: RunDirectoryError, RecipeError if there is no run to join.
    """

    def __init__(self, run_directory: Path) -> None:
        run = RunDirectory(run_directory.resolve())
        if not run.config.is_file():
            raise RunDirectoryError(
                f"--join {run_directory}: it holds no run; `midflight train RECIPE engine.type=http"
                f" run.directory={run_directory}` starts one"
            )
        if load_recipe(run.config).engine.type != "http":
            raise RecipeError(f"--join {run_directory}: the run generates by itself; engine.type = 'http' would work")
        self._directory = run.engines
        self._file: Path | None = None

    def enter(self, url: str) -> None:
        """Say that this server is ready, at an address that other machines can reach if it listens on all."""
        parsed = httpx.URL(url)
        if parsed.host in _ANY_ADDRESS:
            parsed = parsed.copy_with(host=socket.gethostname())
        name = re.sub(r"[^\w.-]+", "-", f"{parsed.host}-{parsed.port}")
        try:
            self._directory.mkdir(exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"cannot write to {self._directory}: {error.strerror}") from error
        self._file = self._directory / f"{name}.json"
        write_whole(self._file, json.dumps({"url": str(parsed)}) + "\n")

    def withdraw(self) -> None:
        """Say that this server stops."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
