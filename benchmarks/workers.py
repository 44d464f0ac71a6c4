"""Worker processes that measure on request and sleep otherwise: JSON lines over stdin and stdout."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from midflight.errors import WorkerError

_EXIT_SECONDS = 10.0


class Worker:
    """Worker process and its descendants. End it with `close`, or with a context manager that calls `close`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # close() closes it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment},
            bufsize=0,  # so that a readable pipe means an unread line
            start_new_session=True,  # so that its descendants can be killed with it
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request and return its answer; after an error, the worker cannot be used any more.

        Raises: TimeoutError; WorkerError with the last line of the process's output if it died.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        deadline = time.monotonic() + timeout_s
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        answer = b""
        while not answer.endswith(b"\n"):
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            part = stdout.read(1 << 16)
            if not part:
                raise WorkerError(self._last_words())
            answer += part
        parsed: dict[str, Any] = json.loads(answer)
        return parsed

    def close(self) -> None:
        """End the process by closing its stdin; kill it if it is still alive after 10 s."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()
        self._log.close()

    def kill(self) -> None:
        """Kill the process and its descendants at once; do nothing if it has already ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"
