"""Description of the machine on which a figure was measured."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path


def describe_machine() -> dict[str, str | int | float]:
    """Processor, usable cores, current load, versions of Python, torch and transformers, and the date (UTC)."""
    import torch
    import transformers

    return {
        "processor": _processor(),
        "cores": num_cores(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
