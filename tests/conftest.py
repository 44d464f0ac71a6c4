"""Settings of all tests: one thread per process, because tests share two cores with the processes they start.

Converted datasets go to a cache of their own, also in the processes that tests start.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
import torch
from benchmarks.redis_server import RedisServer
from hypothesis import settings

from refusals import refused
from soak import SOAK

__all__ = ["refused"]  # a fixture for all tests

torch.set_num_threads(1)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads sleep instead of keeping a core busy
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="midflight-datasets-")
os.environ["HF_HUB_OFFLINE"] = "1"  # an unreachable hub would be tried for half a minute
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

# A script's background processes ignore Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Wall-clock deadlines fail on a busy machine. Derandomized, so that failures are reproducible.
settings.register_profile("midflight", deadline=None, derandomize=SOAK == 1, max_examples=60 * SOAK)
settings.load_profile("midflight")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of faults that the tests injected: each prints a line `fault: ...`."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    lines = [line for report in reports for line in report.capstdout.splitlines() if line.startswith("fault: ")]
    if lines:
        terminalreporter.write_line(f"{len(lines)} faults injected")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server
