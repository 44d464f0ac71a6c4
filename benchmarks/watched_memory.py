"""Memory of all processes of a run over time, by role, read from /proc while the run goes on (Linux)."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.watcher import Watcher
from midflight.errors import BenchmarkError

_EVERY_S = 0.2
_FORK_SERVER = b"multiprocessing.forkserver"
_SPAWNED = b"multiprocessing.spawn"
_KB = 1024 / 1e6  # a kB of the kernel in MB


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of one process at one time (MB, 10^6 bytes).

    `own_mb` leaves out shared weights. A page of n processes counts 1/n in each, so the sum over all processes is the
    memory of the run.
    """

    sweep: int  # samples of one sweep are of the same time
    pid: int
    own_mb: float
    private_mb: float  # freed by the end of the process
    shared_memory_mb: float  # share of the files in memory, such as the slots of the weights

    @classmethod
    def of(cls, sweep: int, pid: int, rollup: str) -> Sample:
        """Read the contents of /proc/PID/smaps_rollup."""
        fields = (line.partition(":") for line in rollup.splitlines()[1:])
        kb = {name: int(rest.split()[0]) for name, _, rest in fields}
        return cls(
            sweep,
            pid,
            own_mb=(kb["Pss"] - kb["Pss_Shmem"]) * _KB,
            private_mb=(kb["Private_Clean"] + kb["Private_Dirty"]) * _KB,
            shared_memory_mb=kb["Pss_Shmem"] * _KB,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of the processes of one role (MB): `steady` is the median of the second half of their samples."""

    steady: float
    peak: float
    peak_private: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Usage:
        return cls(
            steady=statistics.median(sample.own_mb for sample in samples[len(samples) // 2 :]),
            peak=max(sample.own_mb for sample in samples),
            peak_private=max(sample.private_mb for sample in samples),
        )


Samples = Mapping[str, Sequence[Sample]]


def usage_by_role(samples: Samples, together: Iterable[str]) -> dict[str, Usage]:
    """Return the usage of each role.

    Roles of `together` count only while all are alive: the end of one raises the share of the others in common pages.
    """
    common = _common_sweeps(samples, together)
    return {
        role: Usage.of([sample for sample in series if role not in together or sample.sweep in common])
        for role, series in samples.items()
    }


def shared_memory_mb(samples: Samples, together: Iterable[str]) -> float:
    """Median of the files in memory, each counted once, while all roles of `together` are alive (MB)."""
    totals = dict.fromkeys(_common_sweeps(samples, together), 0.0)
    for sample in itertools.chain.from_iterable(samples.values()):
        if sample.sweep in totals:
            totals[sample.sweep] += sample.shared_memory_mb
    return statistics.median(totals.values())


def _common_sweeps(samples: Samples, roles: Iterable[str]) -> set[int]:
    """Sweeps with a sample of every role. Raises: BenchmarkError if there is none."""
    common = set.intersection(*({sample.sweep for sample in samples.get(role, ())} for role in roles))
    if not common:
        raise BenchmarkError("the run ended before its processes could be measured together; more steps would work")
    return common


class WatchedMemory(Watcher):
    """Context in which a process and all its descendants are watched; `samples` has those of each role."""

    def __init__(self, supervisor: int, run_directory: Path) -> None:
        super().__init__(_EVERY_S)
        self.samples: dict[str, list[Sample]] = {}
        self._supervisor, self._logs = supervisor, run_directory.resolve() / "logs"
        self._sweep = 0

    def sweep(self) -> None:
        """Take a sample of every process."""
        self._sweep += 1
        self._visit(self._supervisor, "supervisor")

    def _visit(self, pid: int, role: str) -> None:
        """Take a sample of a process and of all its descendants."""
        process = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError, KeyError):  # the process has just ended
            sample = Sample.of(self._sweep, pid, (process / "smaps_rollup").read_text())
            self.samples.setdefault(role, []).append(sample)
        with contextlib.suppress(OSError):
            for child in (process / "task" / str(pid) / "children").read_text().split():
                with contextlib.suppress(OSError):
                    self._visit(int(child), self._role_of(Path(f"/proc/{child}"), role))

    def _role_of(self, process: Path, parent: str) -> str:
        """Role of a child: of a worker by its log, which its grading processes share."""
        command = (process / "cmdline").read_bytes()
        if parent == "supervisor":
            return "fork server" if _FORK_SERVER in command else "other"
        if parent == "fork server":
            output = (process / "fd" / "1").readlink()
            return output.stem if output.parent == self._logs else "check"
        return "grader" if _SPAWNED in command else "other"
