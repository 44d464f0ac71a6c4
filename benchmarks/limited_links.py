"""Network namespaces whose links to a common bridge are limited: machines of a cluster, on one machine. Needs root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from midflight.errors import BenchmarkError

_CLONE_NEWNET = 0x40000000
_NETWORK = "10.251.77"
# Size of a burst that passes at full speed. A link of 1 Gbit/s needs some 10 ms of data for its queue to stay exact.
_BURST = "256kb"


def why_impossible() -> str | None:
    """Return why no namespaces can be made here; None if they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs the program {missing[0]}" if missing else None


@contextmanager
def limited_links(num_machines: int, rate: str) -> Iterator[list[str]]:
    """Make namespaces, each with one link that is limited to `rate` in both directions; yield their names.

    The address of each namespace is `address_of(name)`.
    Raises: BenchmarkError if a command fails, with its message.
    """
    prefix = f"mf{os.getpid() % 100000}"
    bridge, names = f"{prefix}b", [f"{prefix}n{index}" for index in range(num_machines)]
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip link set {bridge} up")
        for index, name in enumerate(names):
            outside = f"{prefix}v{index}"
            _run(f"ip netns add {name}")
            _run(f"ip link add {outside} type veth peer name eth0 netns {name}")
            _run(f"ip link set {outside} master {bridge} up")
            _run(f"ip -n {name} addr add {_NETWORK}.{index + 1}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
            _run(f"tc qdisc add dev {outside} root tbf rate {rate} burst {_BURST} latency 100ms")
            _run(f"tc -n {name} qdisc add dev eth0 root tbf rate {rate} burst {_BURST} latency 100ms")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def enter(namespace: str) -> None:
    """Move this thread, and all threads that it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise BenchmarkError(f"cannot enter the network namespace {namespace}: {os.strerror(ctypes.get_errno())}")


def address_of(namespace: str) -> str:
    return f"{_NETWORK}.{int(namespace.rpartition('n')[2]) + 1}"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{command}: {done.stderr.strip()}")
