"""The weight sender of a trainer rank that takes part in gathering weights but sends none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from midflight.types import TensorSpec


class NullSender:
    """Consumes every tensor and sends none."""

    sent_bytes = 0

    def announce(self, specs: Sequence[TensorSpec]) -> None:
        pass

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        deque(weights, maxlen=0)

    def relabel(self, version: int) -> None:
        pass

    def wants_weights(self) -> bool:
        return False

    def close(self) -> None:
        pass
