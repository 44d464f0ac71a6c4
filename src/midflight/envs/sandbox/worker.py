"""The worker: a process that forks a confined job for every execution and waits for its end.

consumes: one request at a time from its standard input; waits for: a job's end or its deadline;
unblocked by: the Sandbox that started it. It ends with its parent, and its jobs with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import sysconfig
import tempfile
import time
from typing import Any, NoReturn

from midflight.envs.sandbox import job, linux
from midflight.envs.sandbox.confinement import LIMITS, Confinement

_LENGTH_BYTES = 4
_COMMON_MODULES = (
    "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq",
    "itertools", "json", "math", "operator", "queue", "random", "re", "statistics", "string", "typing",
)  # fmt: skip


def main() -> None:
    """Answer requests until the end of the input. The first message describes the protections."""
    options = json.loads(sys.argv[1])
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGALRM})
    packages = options["packages"]
    confinement = Confinement.strongest(bool(packages), options["without"])
    confinement.enter()
    if linux.IS_LINUX:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if packages:
        sys.path += dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    for name in (*_COMMON_MODULES, *packages):
        try:
            importlib.import_module(name)
        except Exception as error:
            write_message(answers, {"error": f"cannot import {name}: {type(error).__name__}: {error}"})
            return
    gc.freeze()  # jobs then copy fewer pages
    base_bytes = _address_space()
    confinement.change_root()
    write_message(answers, {"protections": confinement.protections()})
    while (request := read_message(requests)) is not None:
        with confinement.scratch_directory():
            answer = _run(request, confinement, base_bytes)
        write_message(answers, answer)


def write_message(descriptor: int, message: dict[str, Any]) -> None:
    """Write a message: its length, then JSON."""
    content = json.dumps(message).encode()
    data = memoryview(len(content).to_bytes(_LENGTH_BYTES) + content)
    while data:
        data = data[os.write(descriptor, data) :]


def read_message(descriptor: int) -> dict[str, Any] | None:
    """Read a message; None at the end of the input."""
    header = _read(descriptor, _LENGTH_BYTES)
    content = _read(descriptor, int.from_bytes(header)) if header else b""
    return dict(json.loads(content)) if content else None


def _run(request: dict[str, Any], confinement: Confinement, base_bytes: int) -> dict[str, Any]:
    """Run one job to its end; return how it ended, the results of its tests and its output."""
    token = os.urandom(8).hex()
    with contextlib.ExitStack() as stack:
        files = [_temporary_file(stack) for _ in range(4)]
        stdin, stdout, stderr, results = files
        os.write(stdin, request["stdin"].encode(errors="surrogateescape"))
        os.lseek(stdin, 0, os.SEEK_SET)
        process = os.fork()
        if process == 0:
            _become_job(request, confinement, base_bytes, files, token)
        status = _wait(process, time.monotonic() + request["timeout_s"])
        if confinement.kind == LIMITS:  # in other kinds, a job is one process
            _kill(process)
        limit = request["max_output"]
        records = os.pread(results, len(request["tests"] or ()) * (len(token) + 1), 0).decode(errors="replace")
        return {
            "timed_out": status is None,
            "exit_code": None if status is None else os.waitstatus_to_exitcode(status),
            "passed": [record == "1" for record in records.split(token)[1:]],
            "stdout": os.pread(stdout, limit, 0).decode(errors="replace"),
            "stderr": os.pread(stderr, limit, 0).decode(errors="replace"),
        }


def _become_job(
    request: dict[str, Any], confinement: Confinement, base_bytes: int, files: list[int], token: str
) -> NoReturn:
    try:
        for standard, file in enumerate(files):
            os.dup2(file, standard)
        os.closerange(len(files), 256)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        confinement.begin_job(base_bytes + (request["memory_mb"] << 20), int(request["timeout_s"]) + 1)
        job.run(request["code"], request["tests"], token)
    finally:
        os._exit(1)


def _wait(process: int, deadline_s: float) -> int | None:
    """Wait for the end of a job and return its status, or kill the job at the deadline and return None."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        signal.setitimer(signal.ITIMER_REAL, left_s)
        signal.sigwait({signal.SIGCHLD, signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, 0)
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
    _kill(process)
    os.waitpid(process, 0)
    return None


def _kill(process: int) -> None:
    """Kill the job and its process group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _temporary_file(stack: contextlib.ExitStack) -> int:
    """Return the descriptor of a file without a name, in memory where possible."""
    if linux.IS_LINUX:
        descriptor = os.memfd_create("sandbox")
        stack.callback(os.close, descriptor)
        return descriptor
    return stack.enter_context(tempfile.TemporaryFile()).fileno()


def _address_space() -> int:
    """Size of the address space of this process (bytes); 0 where the system does not tell."""
    if not linux.IS_LINUX:
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _read(descriptor: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = os.read(descriptor, length - len(data))
        if not part:
            return b""
        data += part
    return data
