"""Generated code that attacks its machine, in every kind of sandbox: it gets no reward and does no harm."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.tasks.attacks import SECRET, attacks
from benchmarks.tasks.sandbox import run_attacks

from midflight.envs.sandbox.sandbox import Sandbox, Statement, unprotected

pytestmark = [
    pytest.mark.slow,  # every test starts processes
    pytest.mark.skipif(sys.platform != "linux", reason="other systems have no sandbox"),
]

TIMEOUT_S = 60.0
TESTS = [Statement("assert True")]
KINDS = {"namespaces": (), "user namespaces": ("root",), "Landlock": ("namespaces",)}
ATTACKS = tuple(attacks(Path(), 0, 0))
HARMLESS = ("writing outside", "reading files", "opening sockets")


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(timeout_s=0.5, without=KINDS[request.param]) as sandbox:
        if unprotected(sandbox.protections()):
            pytest.skip(f"this machine has no {request.param}")
        yield sandbox


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user with a secret in its environment, which ends when its input does."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={"SECRET": SECRET})
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_fails_in_every_kind_of_sandbox(
    sandbox: Sandbox,
    victim: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setenv("MIDFLIGHT_TEST_SECRET", SECRET)
    (tmp_path / "secret").write_text(SECRET)
    mode = tmp_path.stat().st_mode
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = attacks(tmp_path, server.getsockname()[1], victim.pid)[name]
        assert not any(sandbox.run(code, TESTS).passed)
        assert not select.select([server], [], [], 0)[0], "a connection was made"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert tmp_path.stat().st_mode == mode
    assert victim.poll() is None
    assert sandbox.run("", TESTS).passed == (True,)


@pytest.mark.parametrize("name", HARMLESS)
def test_attack_succeeds_without_protection(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text(SECRET)
    with Sandbox(without=("namespaces", "landlock")) as sandbox, socket.create_server(("127.0.0.1", 0)) as server:
        assert {"files", "network"} <= set(unprotected(sandbox.protections()))
        assert sandbox.run(attacks(tmp_path, server.getsockname()[1], 0)[name], TESTS).passed == (True,)


def test_attacks_in_a_grading_process_cost_their_rollouts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFLIGHT_TEST_SECRET", SECRET)
    harmed = {row["attack"]: row["harmed"] for row in run_attacks(tmp_path)}
    assert harmed == dict.fromkeys(ATTACKS, "")


def test_sandbox_ends_with_the_grading_process() -> None:
    program = (
        "from midflight.envs.sandbox.sandbox import Sandbox\n"
        "sandbox = Sandbox(timeout_s=600)\n"
        "sandbox.protections()\n"
        "print(sandbox.worker_pid, flush=True)\n"
        "sandbox.run('while True: pass')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout
    with process.stdout:
        worker = int(process.stdout.readline())
        descriptors = [os.pidfd_open(pid) for pid in (worker, *children(worker))]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], TIMEOUT_S)[0], "a process outlives the grading process"
        os.close(descriptor)


def test_dead_worker_is_replaced() -> None:
    with Sandbox() as sandbox:
        sandbox.protections()
        assert sandbox.worker_pid
        os.kill(sandbox.worker_pid, signal.SIGKILL)
        assert sandbox.run("", TESTS).passed == (True,)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
