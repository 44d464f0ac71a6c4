"""Arguments and outcome of one check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


class NotApplicableError(Exception):
    """Raised by a check that this machine cannot make; the message says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Arguments of all checks."""

    device: str
    small: bool  # tiny models and few rounds: a rehearsal of the code, whose figures mean nothing
    scratch: str  # a directory that all checks of a run share

    @property
    def on(self) -> torch.device:
        """The device, with an index."""
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device(self.device)

    @property
    def is_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def scratch_path(self) -> Path:
        return Path(self.scratch)

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for another process."""
        return asdict(self)


def relative_difference(actual: float, expected: float) -> float:
    """|actual - expected| / |expected|."""
    return abs(actual - expected) / max(abs(expected), 1e-30)
