"""Registry of the servers that generate for a run: one file NAME.json each, {"url": "http://..."}, in RUN/engines.

A server writes its file when it is ready and removes it when it stops; a killed server leaves its file behind. Files
written by hand work as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


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
