"""Decoded tokens per second of midflight's engine and others: `midflight bench decode`, with the same options."""

from __future__ import annotations

import sys

from midflight.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "decode"]
    main()
