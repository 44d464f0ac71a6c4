"""The C compiler of this machine. Imports no torch."""

from __future__ import annotations

import os
import shlex
import shutil


def compiler_command() -> list[str]:
    """Return the words of $CC, otherwise the path of cc or gcc; empty if there is none."""
    found = shutil.which("cc") or shutil.which("gcc")
    return shlex.split(os.environ.get("CC", "")) or ([found] if found else [])
