"""Stop of a run whose losses or gradients are repeatedly not finite."""

from __future__ import annotations

from pathlib import Path

from midflight.errors import NonFiniteLossError
from midflight.streams.codec import Codec
from midflight.types import TrainingBatch

_CODEC = Codec(TrainingBatch)


class GiveUpPolicy:
    """Counter of consecutive skipped steps, up to `limit`."""

    def __init__(self, limit: int, rejected_batches: Path) -> None:
        self._limit, self._directory = limit, rejected_batches
        self._num_in_a_row = 0

    def is_reached(self, batch: TrainingBatch, skipped: bool) -> bool:
        """Count one step; return True at the limit. A batch without microbatches is not counted."""
        if any(batch.microbatches):
            self._num_in_a_row = self._num_in_a_row + 1 if skipped else 0
        return self._num_in_a_row >= self._limit

    def keep(self, batch: TrainingBatch) -> None:
        """Write the batch to a file, for inspection."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._path(batch).write_bytes(_CODEC.encode(batch))

    def error(self, batch: TrainingBatch) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"{self._num_in_a_row} steps in a row had a loss or gradient that is not finite, and were"
            f" skipped. Inspect the last batch, in {self._path(batch)}"
        )

    def _path(self, batch: TrainingBatch) -> Path:
        return self._directory / f"batch_{batch.index}.msgpack"
