"""The grading process's end of the sandbox: starts a worker, sends it code, and replaces it if it dies."""

from __future__ import annotations

import functools
import json
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import midflight
from midflight.envs.sandbox.worker import read_message, write_message

_START_TIMEOUT_S = 60.0
_GRACE_S = 5.0  # the worker watches the time limit; this much later, the worker itself hangs
_MAX_OUTPUT = 65_536  # bytes of each of stdout and stderr
_MAX_ATTEMPTS = 2
_BOOTSTRAP = (
    "import sys; sys.path.append({path!r}); from midflight.envs.sandbox.worker import main; sys.path.pop(); main()"
)
# All of the environment: no secrets. A fixed hash seed gives equal responses equal rewards.
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxError(Exception):
    """The sandbox itself does not work; never an effect of the generated code alone."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement that runs after the code: a test that counts, or a preparation of the tests that follow."""

    source: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Execution:
    """Result of one execution. `exit_code` is negative for a signal, and None if the time was up."""

    exit_code: int | None
    passed: tuple[bool, ...]  # tests that counted and ran, in order
    stdout: str
    stderr: str


class Sandbox:
    """Runs generated Python code with limits. One worker process starts at the first execution and ends with this one.

    `packages` are modules that are imported before the code runs; with any, all installed packages can be imported.
    `without` leaves out kinds of confinement ("namespaces", "landlock", or "root" for the namespaces of root), for
    tests and for kernels that do not do as they say.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        packages: Sequence[str] = (),
        without: Collection[str] = (),
    ) -> None:
        self._timeout_s, self._memory_mb = timeout_s, memory_mb
        self._options = json.dumps({"packages": list(packages), "without": sorted(without)})
        self._worker: _Worker | None = None

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; None before the first execution."""
        return None if self._worker is None else self._worker.pid

    def protections(self) -> dict[str, str]:
        """Kind of confinement, and protection of files, network, processes, memory and time; "" for one without.

        Raises: SandboxError if the worker cannot start.
        """
        return self._started().protections

    def run(
        self,
        code: str,
        tests: Sequence[Statement] | None = None,
        *,
        stdin: str = "",
        timeout_s: float | None = None,
        max_output: int = _MAX_OUTPUT,
    ) -> Execution:
        """Run the code and its tests in a new process; without tests, run it as a program.

        Output beyond `max_output` bytes is cut. Raises: SandboxError if the worker dies twice or hangs.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        request = {
            "code": code,
            "tests": None if tests is None else [(test.counts, test.source) for test in tests],
            "stdin": stdin,
            "timeout_s": timeout_s,
            "memory_mb": self._memory_mb,
            "max_output": max_output,
        }
        answer = None
        for _ in range(_MAX_ATTEMPTS):
            answer = self._started().ask(request, timeout_s + _GRACE_S)
            if answer is not None:
                break
            self.close()
        if answer is None:
            raise SandboxError("the sandbox's worker process died twice; the machine may be short of memory")
        return Execution(answer["exit_code"], tuple(answer["passed"]), answer["stdout"], answer["stderr"])

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> _Worker:
        self._worker = self._worker or _Worker(self._options)
        return self._worker


@functools.cache
def protections() -> dict[str, str]:
    """Kind of confinement, and protection of files, network, processes, memory and time; "" for one without.

    Raises: SandboxError if the sandbox cannot start.
    """
    with Sandbox() as sandbox:
        return sandbox.protections()


def unprotected(protections: dict[str, str]) -> list[str]:
    """Names of what generated code could damage: files, network or processes."""
    return [name for name in ("files", "network", "processes") if not protections[name]]


class _Worker:
    """The worker process and the pipes to it."""

    def __init__(self, options: str) -> None:
        source = str(Path(midflight.__file__).parents[1])
        command = [sys.executable, "-s", "-P", "-S", "-c", _BOOTSTRAP.format(path=source), options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_ENVIRONMENT, cwd="/", bufsize=0
        )
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process)  # also if nobody closes the sandbox
        try:
            started = self._receive(time.monotonic() + _START_TIMEOUT_S)
            if started is None or "error" in started:
                reason = started["error"] if started else f"exit code {self._process.wait()}"
                raise SandboxError(f"the sandbox's worker process cannot start: {reason}")
        except BaseException:
            self.kill()
            raise
        self.protections: dict[str, str] = started["protections"]

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Send a request and return the answer; None if the worker died."""
        assert self._process.stdin is not None
        try:
            write_message(self._process.stdin.fileno(), request)
            return self._receive(time.monotonic() + timeout_s)
        except BrokenPipeError:
            return None

    def kill(self) -> None:
        self._end()

    def _receive(self, deadline_s: float) -> dict[str, Any] | None:
        """Return the next message; None at the end of the worker's output. Raises: SandboxError after the deadline."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        if not select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            self.kill()
            raise SandboxError("the sandbox's worker process does not answer")
        return read_message(descriptor)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
