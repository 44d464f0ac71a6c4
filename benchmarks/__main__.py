"""Entry point of `python -m benchmarks NAME [options]`; `python -m benchmarks --help` lists the names."""

from __future__ import annotations

import sys

from benchmarks.commands import app
from midflight.errors import MidflightError

if __name__ == "__main__":
    try:
        app()
    except MidflightError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
