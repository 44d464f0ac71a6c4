"""The weight sender of a rank that only takes part in gathering them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from midflight.types import TensorSpec


class NullSender:
    """Asks for every tensor and keeps none."""

    def announce(self, specs: Sequence[TensorSpec]) -> None:
        pass

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        deque(weights, maxlen=0)

    def close(self) -> None:
        pass
