"""Peak resident memory of the processes of a run, and growth of this process's memory, read from /proc."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from types import TracebackType

from benchmarks.watcher import Watcher
from midflight.trainer.allocator import return_freed_memory

_EVERY_S = 0.25


class PeakMemory(Watcher):
    """Context in which the workers of a run are watched; `peak_mib` then has the peak of each role (MiB).

    A worker writes its output to `logs/ROLE.log` of the run directory, which tells its role. Resident memory includes
    shared memory and mapped files, which several processes may count.
    """

    def __init__(self, run_directory: Path) -> None:
        super().__init__(_EVERY_S)
        self.peak_mib: dict[str, float] = {}
        self._logs = run_directory.resolve() / "logs"

    def sweep(self) -> None:
        """Read the peaks of all workers."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended or belongs to another user
                output = (process / "fd" / "1").readlink()
                if output.parent == self._logs:
                    self._note(output.stem, (process / "status").read_text())

    def _note(self, role: str, status: str) -> None:
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                self.peak_mib[role] = max(self.peak_mib.get(role, 0.0), int(line.split()[1]) / 1024)


class MemoryGrowth:
    """Context that measures this process; `num_bytes` is its peak inside, less its memory at the start (resident)."""

    num_bytes = 0

    def __enter__(self) -> MemoryGrowth:
        # Otherwise memory that was free before could be used unnoticed, or be freed inside.
        gc.collect()
        return_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present memory
        self._start_kib = _resident_kib("VmRSS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.num_bytes = (_resident_kib("VmHWM") - self._start_kib) * 1024


def _resident_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])
