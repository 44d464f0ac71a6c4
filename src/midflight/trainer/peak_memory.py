"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_memory_bytes(device: torch.device) -> int:
    """Peak allocated memory of a CUDA device; on the CPU, peak resident memory, including mapped files (bytes)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        # ru_maxrss would include the parent's memory at the start of this process.
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
