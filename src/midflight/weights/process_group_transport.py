"""Weight transport over a process group of the trainer's rank 0 and all engines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from midflight.errors import RecipeError
from midflight.weights.engine_control import TOKEN_VARIABLE
from midflight.weights.fleet import SenderSettings
from midflight.weights.group_sender import GroupSender
from midflight.weights.group_source import GroupSettings
from midflight.weights.membership import Entry
from midflight.weights.process_group import DEFAULT_TIMEOUT_S, Backend
from midflight.weights.version_board import VersionBoard


@dataclass(frozen=True, slots=True)
class ProcessGroupTransport:
    """Weights go from the trainer to the servers of the run; the rollout process sees version numbers only.

    Raises: RecipeError if the backend is nccl and this machine has no CUDA device.
    """

    shared: Path
    engines: Callable[[], Mapping[str, Entry]]
    lineage: str
    note: Callable[[str], object]
    device: str = "cpu"
    backend: Backend = "tcp"
    address: str | None = None
    bucket_mib: int = 32
    timeout_s: float = DEFAULT_TIMEOUT_S
    snapshot: bool = True

    def sender(self) -> GroupSender:
        if self.backend == "nccl" and not torch.cuda.is_available():
            raise RecipeError("weights.backend = 'nccl' needs a CUDA device, and the trainer has none; use 'tcp'")
        device = torch.device(self.device if self.backend == "nccl" else "cpu")
        group = GroupSettings(self.backend, self.address, self.timeout_s, device)
        settings = SenderSettings(group, self.lineage, self.bucket_mib << 20, self.snapshot)
        board = VersionBoard(self.shared)
        return GroupSender(settings, self.engines, board.publish, self.note, os.environ.get(TOKEN_VARIABLE))

    def versions(self) -> VersionBoard:
        return VersionBoard(self.shared)

    def receiver(self) -> None:
        """Return None: the servers receive."""
