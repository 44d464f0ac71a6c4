"""Checks of this machine: which parts of midflight work here, and the remedy for each part that does not.

The module imports without torch, so that it can report that torch is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from midflight.engine.kernels.compiler import compiler_command
from midflight.envs.sandbox.sandbox import SandboxError, protections, unprotected
from midflight.report.machine import num_cores

_MIB = 1 << 20
_COMPILER_TIMEOUT_S = 10
_FEW_OPEN_FILES = 1024
_LITTLE_DISK = 1024 * _MIB  # a few checkpoints of a model of 100 M parameters
_LEAST_DISK = 16 * _MIB  # one run of the demo
_SMALL_SHARED_MEMORY = 64 * _MIB  # a container's default
_STYLES = {"ok": "green", "limited": "yellow", "missing": "red"}
_OPTIONAL = {  # package -> (use, remedy)
    "matplotlib": ("plots of `report` and `compare`", "pip install 'midflight[plot]'"),
    "redis": ("streams.type = redis", "pip install 'midflight[redis]'"),
    "peft": ("trainer.lora_rank", "pip install 'midflight[lora]'"),
    "deepspeed": ("trainer.type = deepspeed", "pip install 'midflight[deepspeed]'"),
    "triton": ("attention kernel on CUDA", "comes with the CUDA build of torch"),
    "vllm": ("comparison in `python -m benchmarks decode`", "install in an environment of its own"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table."""

    name: str
    found: str
    state: Literal["ok", "limited", "missing"] = "ok"
    remedy: str = ""  # empty if the state is ok
    required: bool = False  # training is impossible while it is missing


def check_machine(directory: Path) -> list[Check]:
    """Return every check of this machine; runs would be written below `directory`."""
    return [
        Check("Python", platform.python_version()),
        *_torch(),
        _required_package("transformers"),
        _compiler(),
        _cores(),
        _shared_memory(),
        _disk(directory),
        _write_permission(directory),
        _open_files(),
        _sandbox(),
        *(_optional_package(name, *rest) for name, rest in _OPTIONAL.items()),
    ]


def obstacles(checks: Sequence[Check]) -> list[Check]:
    """Return the checks that make training on this machine impossible."""
    return [check for check in checks if check.required and check.state == "missing"]


def print_checks(checks: Sequence[Check]) -> None:
    """Print a table to stdout, and one line that says if training works."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # one line per check, for grep
    table = Table(box=None, pad_edge=False)
    for title in ("check", "found", "state", "remedy"):
        table.add_column(title, overflow="fold")
    for check in checks:
        table.add_row(check.name, escape(check.found), Text(check.state, _STYLES[check.state]), escape(check.remedy))
    console.print(table, highlight=False)
    names = ", ".join(check.name for check in obstacles(checks))
    console.print(f"\nTraining does not work here: {names}" if names else "\nTraining works here.", highlight=False)


def _torch() -> list[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = str(error).partition("\n")[0]
        return [Check("torch", reason, "missing", "pip install torch", required=True)]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    checks = [Check("torch", f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where it finds a driver that does not work
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(num_devices))
    remedy = "not needed for small models; runs use the CPU" if not torch.version.cuda else "look at nvidia-smi"
    return [*checks, Check("CUDA devices", names) if names else Check("CUDA devices", "none", "missing", remedy)]


def _required_package(name: str) -> Check:
    version = _version_of(name)
    if version is None:
        return Check(name, "not installed", "missing", f"pip install {name}", required=True)
    return Check(name, version)


def _sandbox() -> Check:
    """Protections of the reward `code`; they are found out by starting a sandbox."""
    name = "sandbox (reward `code`)"
    try:
        found = protections()
    except (OSError, SandboxError) as error:
        return Check(name, str(error), "missing", "needs Linux; without it, leave out the reward `code`")
    protected = [part for part, by in found.items() if by and part != "kind"]
    text = f"{found['kind']}: {', '.join(protected)}"
    if missing := unprotected(found):
        remedy = f"generated code can reach {', '.join(missing)}; allow user namespaces, or use Linux 5.13 or newer"
        return Check(name, text, "limited", remedy)
    return Check(name, text)


def _optional_package(name: str, use: str, remedy: str) -> Check:
    version = _version_of(name)
    return Check(name, f"{version}: {use}") if version else Check(name, f"none: {use}", "missing", remedy)


def _version_of(package: str) -> str | None:
    """Version of an installed package that can be imported, without importing it."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def _compiler() -> Check:
    remedy = "decoding on the CPU is slower without; install gcc or clang, or set CC"
    command = compiler_command()
    if not command:
        return Check("C compiler", "no cc, no gcc", "limited", remedy)
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, check=True, timeout=_COMPILER_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return Check("C compiler", f"{' '.join(command)} does not run", "limited", remedy)
    return Check("C compiler", done.stdout.partition("\n")[0] or command[0])


def _cores() -> Check:
    cores, load = num_cores(), os.getloadavg()[0]
    found = f"{cores}, load {load:.1f}"
    if cores < 2:
        return Check("cores", found, "limited", "generation and training share it; two cores or more are faster")
    if load > cores:
        return Check("cores", found, "limited", "other programs use them: runs and measurements are slower")
    return Check("cores", found)


def _shared_memory() -> Check:
    path = Path("/dev/shm")
    remedy = "weights go through files, which is slower; "
    if not path.is_dir():
        return Check("shared memory", "no /dev/shm", "limited", f"{remedy}mount a tmpfs there")
    usage = shutil.disk_usage(path)
    found = f"{_size(usage.free)} of {_size(usage.total)} free in /dev/shm"
    if usage.free < _SMALL_SHARED_MEMORY:
        return Check("shared memory", found, "limited", f"{remedy}start the container with --shm-size=1g")
    return Check("shared memory", found)


def _disk(directory: Path) -> Check:
    free = shutil.disk_usage(directory).free
    found = f"{_size(free)} free in {directory}"
    if free < _LEAST_DISK:
        return Check("disk", found, "missing", "free some space, or change to another directory", required=True)
    if free < _LITTLE_DISK:
        return Check("disk", found, "limited", "a checkpoint takes three times the size of the model")
    return Check("disk", found)


def _write_permission(directory: Path) -> Check:
    try:
        with tempfile.TemporaryFile(dir=directory):
            return Check("write permission", str(directory))
    except OSError as error:
        found = f"cannot write to {directory}: {error.strerror}"
        return Check("write permission", found, "missing", "change to a directory of your own", required=True)


def _open_files() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Check("open files", "no limit")
    if limit < _FEW_OPEN_FILES:
        return Check("open files", f"at most {limit}", "limited", f"ulimit -n {4 * _FEW_OPEN_FILES}")
    return Check("open files", f"at most {limit}")


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB" if num_bytes < 10240 * _MIB else f"{num_bytes / _MIB / 1024:,.0f} GiB"
