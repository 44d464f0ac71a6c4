"""Description of a machine with a CUDA device."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
from typing import Any

import torch

from midflight.report.machine import describe_machine

_PACKAGES = ("triton", "safetensors", "nvidia-nccl-cu13")


def describe_gpu_machine(device: str) -> dict[str, Any]:
    """Date, processor, device, driver and versions."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    machine = {"date": datetime.date.today().isoformat(), "device": device, **describe_machine(), **versions}
    return machine | (_describe_cuda() if torch.device(device).type == "cuda" else {})


def _describe_cuda() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
