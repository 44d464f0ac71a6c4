"""Small user-defined implementations of every protocol, and some that are incomplete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from midflight.launch.engines import embedded_engine
from midflight.protocols import LocalEngine
from midflight.streams.sqlite import SqliteStream
from midflight.types import BatchChoice, FleetView, Float64Array, ReadyGroup
from midflight.weights.files import FileReceiver, FileSender


class InTurns:
    """Schedule that alternates between one batch and one optimizer step."""

    def __init__(self, batch_size: int, backwards: bool = False) -> None:
        self.batch_size, self.backwards = batch_size, backwards
        self.colocated = True
        self.max_in_flight = batch_size

    def num_to_admit(self, fleet: FleetView) -> int:
        return (fleet.version + 1) * self.batch_size - fleet.num_started

    def should_abort(self, fleet: FleetView) -> bool:
        return False

    def choose_batch(self, fleet: FleetView, ready: Sequence[ReadyGroup]) -> BatchChoice | None:
        if sum(group.num_rollouts for group in ready) < self.batch_size:
            return None
        return BatchChoice(train=tuple(sorted((group.group_id for group in ready), reverse=self.backwards)))

    def should_update_weights(self, fleet: FleetView) -> bool:
        return fleet.newest_version > fleet.version


def centered(rewards: Float64Array, scale: float = 1.0) -> Float64Array:
    return scale * (rewards - np.median(rewards))


def logging_engine(log: str, model_path: Path, max_num_seqs: int, **settings: Any) -> LocalEngine:
    """Make the embedded engine, and append a line to a file."""
    settings.pop("threads")
    with Path(log).open("a") as file:
        file.write(f"{model_path.name} {max_num_seqs}\n")
    return embedded_engine(max_num_seqs=max_num_seqs, **settings)


class CountedStream(SqliteStream[Any]):
    """SQLite stream that writes its record count to a file."""

    def __init__(self, path: Path, record_type: type[Any], capacity: int, suffix: str) -> None:
        super().__init__(path, record_type, capacity)
        self.counts = path.with_suffix(suffix)

    def append_many(self, records: Sequence[Any], timeout_s: float | None = None) -> list[int]:
        offsets = super().append_many(records, timeout_s)
        self.counts.write_text(str(self.next_offset()))
        return offsets


class OwnDirectory:
    """Weight transport through its own directory."""

    def __init__(self, run_directory: Path, name: str) -> None:
        self.directory = run_directory / name

    def sender(self) -> FileSender:
        return FileSender(self.directory)

    def versions(self) -> FileReceiver:
        return FileReceiver(self.directory)

    def receiver(self) -> FileReceiver:
        return FileReceiver(self.directory)


class ToServers(OwnDirectory):
    """Weight transport that knows the servers of the run when it is made."""

    def __init__(self, run_directory: Path, engines: Callable[[], Mapping[str, Any]], lineage: str) -> None:
        super().__init__(run_directory, "weights")
        self.urls, self.lineage = {name: entry.url for name, entry in engines().items()}, lineage


class TextSink:
    def __init__(self, run_directory: Path, version: int, name: str = "steps") -> None:
        self.file = (run_directory / f"{name}.txt").open("a")
        self.file.write(f"after {version}\n")

    def write(self, line: Mapping[str, Any]) -> None:
        self.file.write(f"{line['version']} {line['reward/mean']}\n")

    def close(self) -> None:
        self.file.close()


class FailingSink:
    def write(self, line: Mapping[str, Any]) -> None:
        raise ConnectionError("nobody there")

    def close(self) -> None:
        pass


class Nothing:
    """Class without any member of a protocol."""


class Raises(InTurns):
    def __init__(self, batch_size: int) -> None:
        raise LookupError("no such table")


number = 3
