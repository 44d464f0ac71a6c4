"""Clients that attack a server, in processes of their own; and the server process that they attack.

Run as `python -m faults.attacks NAME URL`: attacks until it is killed. The processes are nice, so that the clients take
only the time of the processor that the server and the run leave.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from midflight.config import SHIPPED_RECIPES
from midflight.generation.client import HTTPGenerator

RECIPE = SHIPPED_RECIPES["cpu_demo"]
TIMEOUT_S = 5.0  # of the server for its clients
NUM_SLOTS = 8
_LOG_BYTES = 200_000
_BODIES: dict[str, Callable[[], bytes]] = {
    "unknown_fields": lambda: _json({f"u{index}": 0 for index in range(300_000)} | {"prompt": "a1:"}),
    "wrong_prompts": lambda: _json({"prompt": [True] * 700_000}),
    "long_prompt": lambda: _json({"prompt": "a1+" * 1_300_000}),
    "many": lambda: _json({"prompt": "a1+2:", "n": 128, "max_tokens": 64, "stop_token_ids": []}),
}
_HEADERS = {
    "foreign_host": {"Host": "rebound.example"},
    "foreign_origin": {"Origin": "https://evil.example"},
    "wrong_key": {"Authorization": "Bearer wrong"},
}


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


@dataclass
class Served:
    """A server process. `log`: its stderr."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def wait_until_idle(self) -> None:
        """Wait until no sequence is in flight."""
        while self.http.get("/health").json()["in_flight"]:
            pass

    def peak_mib(self) -> float:
        """Largest resident memory so far."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024

    def check_bounds(self, peak_mib: float) -> None:
        """Check that the memory and the log are bounded. `peak_mib`: before the attack."""
        assert self.peak_mib() - peak_mib < 600
        assert self.log.stat().st_size < _LOG_BYTES, self.log.read_text()[-2000:]


@contextmanager
def serving(directory: Path, *overrides: str) -> Iterator[Served]:
    """Start a server on a free port."""
    log = directory / f"log{len(list(directory.iterdir()))}"
    command = [sys.executable, "-m", "midflight", "serve", str(RECIPE), "serve.port=0", "engine.threads=1"]
    options = [f"serve.num_in_flight={NUM_SLOTS}", f"serve.client_timeout_s={TIMEOUT_S:g}"]
    with log.open("w") as stderr:
        process = subprocess.Popen([*command, *options, *overrides], stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            assert process.stdout
            served = Served(process, process.stdout.readline().removeprefix("serving at ").strip(), log)
            with served.http:
                yield served
        finally:
            process.kill()
            process.communicate()


@contextmanager
def attacking(name: str, url: str) -> Iterator[subprocess.Popen[str]]:
    """Attack the server from a process of its own; the block starts once the attack has."""
    command = [sys.executable, "-m", "faults.attacks", name, url]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout
        assert process.stdout.readline() == "attacking\n"
        yield process
        assert process.poll() is None, "the attack must last as long as the run"
    finally:
        process.kill()
        process.communicate()


def generate(client: HTTPGenerator, first: int, num: int, in_flight: int = NUM_SLOTS) -> dict[int, list[int]]:
    """Keep rollouts of a run in flight until `num` have ended; return their tokens."""
    from contract.generating import LONG, requests

    tokens: dict[int, list[int]] = {}
    waiting = list(requests(num, LONG, first))
    while len(tokens) < num:
        free = in_flight - client.num_in_flight
        if free and waiting:
            client.add(waiting[:free])
            del waiting[:free]
        for completion in client.step():
            assert completion.finish_reason.value != "abort"
            tokens[completion.rollout_id] = completion.generated.token_ids.tolist()
    return tokens


# --- in the process of the attack ---------------------------------------------------------------------------------


def _loop(url: str, body: bytes, headers: dict[str, str], num_threads: int = 1) -> None:
    """Send the same request again and again, each time as soon as the answer to the last one has come."""

    def send_all() -> None:
        address = urlsplit(url).netloc
        connection = http.client.HTTPConnection(address, timeout=120)
        while True:
            try:
                connection.request(
                    "POST", "/v1/completions", body, {"Content-Type": "application/json", "Host": address} | headers
                )
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()

    threads = [threading.Thread(target=send_all, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    print("attacking", flush=True)
    threads[0].join()


def _half_requests(url: str, num: int = 1100) -> None:
    """Keep many connections with half of a request each, adding a byte now and then."""
    address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
    connections: list[socket.socket] = []
    for round_number in itertools.count():
        while len(connections) < num:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(address, 10)
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b")
                connections.append(connection)
        if not round_number:
            print("attacking", flush=True)
        for connection in list(connections):
            try:
                connection.sendall(b"b")
            except OSError:
                connections.remove(connection)
                connection.close()
        time.sleep(0.2)


def _never_read(url: str, num: int = 50) -> None:
    """Ask for long streams and read nothing of them."""
    address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
    body = _json({"prompt": "a1+2:", "n": 128, "stream": True, "stop_token_ids": [], "return_token_ids": True})
    lines = ("POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json")
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    connections = []
    for number in itertools.count():
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(OSError):
            connection.connect(address)
            connection.sendall(head.encode() + body)
        connections.append(connection)
        if number == num:
            print("attacking", flush=True)
        if number >= num:
            connections.pop(0).close()
            time.sleep(0.2)


def main() -> None:
    """Attack until killed."""
    os.nice(19)
    name, url = sys.argv[1:]
    if name == "half_requests":
        _half_requests(url)
    elif name == "never_read":
        _never_read(url)
    elif name == "garbage":
        _garbage(url)
    elif name in _HEADERS:
        _loop(url, _json({"prompt": "a1:"}), _HEADERS[name], 20)
    else:
        _loop(url, _BODIES[name.removesuffix("_200")](), {}, 200 if name.endswith("_200") else 3)


def _garbage(url: str) -> None:
    """Send what is not HTTP, each time over a new connection."""
    address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
    print("attacking", flush=True)
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, 10) as connection:
            connection.sendall(b"\x16\x03\x01 what \r\n\r\n")
            connection.recv(1000)


if __name__ == "__main__":
    main()
