"""Runs checks in processes of their own, with time limits: no check can stop the others.

waits for      the next line of the current process
unblocked by   the line, the end of the process, the limit of the check, or the end of the total time
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu.registry import Check
from benchmarks.gpu.setting import Setting

_START_S = 60.0  # longest start of a process: the first one reads torch from a cold disk
_LEAST_S = 12.0  # with less time left, no check is started
_DUMP_S = 2.0  # time for the stacks of a check that hangs
_LOG_LINES = 25
_ROOT = Path(__file__).parents[2]

Outcome = dict[str, Any]


def run_checks(
    checks: Sequence[Check], setting: Setting, budget_s: float, say: Callable[[str], object]
) -> Iterator[Outcome]:
    """Run the checks in order and yield the outcome of each: check, status, seconds, reason, rows."""
    deadline_s = time.monotonic() + budget_s
    for _, members in groupby(checks, key=lambda check: check.group):
        pending = list(members)
        while pending:
            if deadline_s - time.monotonic() < _LEAST_S:
                yield from (_skipped(check, budget_s) for check in pending)
                break
            with _Process(tuple(pending), setting, {}) as process:
                for outcome in process.outcomes(deadline_s):
                    pending.pop(0)
                    if outcome.pop("broken") and setting.is_cuda:
                        outcome["reason"] += _again(outcome["check"], checks, setting, deadline_s)
                    say(f"{outcome['status']:8}{outcome['check']:36}{outcome['seconds']:7.1f} s")
                    yield outcome
                    if deadline_s - time.monotonic() < _LEAST_S:
                        break


def _again(name: str, checks: Sequence[Check], setting: Setting, deadline_s: float) -> str:
    """Repeat a check whose CUDA error may have been reported late, with every launch reported at once."""
    if deadline_s - time.monotonic() < _LEAST_S:
        return ""
    check = next(check for check in checks if check.name == name)
    with _Process([check], setting, {"CUDA_LAUNCH_BLOCKING": "1"}) as process:
        for outcome in process.outcomes(deadline_s):
            return f"\nAgain with CUDA_LAUNCH_BLOCKING=1: {outcome['status']}\n{outcome['reason']}"
    return ""


def _skipped(check: Check, budget_s: float) -> Outcome:
    reason = f"the time of {budget_s:g} s was up"
    return {"check": check.name, "status": "skipped", "seconds": 0.0, "reason": reason, "rows": [], "late": True}


@dataclass
class _Process:
    """One process of worker.py."""

    checks: Sequence[Check]
    setting: Setting
    environment: Mapping[str, str]

    def __enter__(self) -> _Process:
        task = {"setting": self.setting.as_json(), "checks": [(check.name, check.function) for check in self.checks]}
        extra = dict(self.environment)
        if not self.setting.is_cuda and self.checks[0].group == "kernel":
            extra["TRITON_INTERPRET"] = "1"
        self._log = tempfile.TemporaryFile()  # __exit__ closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(task)],
            stdout=subprocess.PIPE,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            cwd=_ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **extra},
            bufsize=0,  # so that a readable pipe means an unread line
            start_new_session=True,  # so that its descendants are killed with it
        )
        self._unread = b""
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def outcomes(self, deadline_s: float) -> Iterator[Outcome]:
        """Yield the outcome of each check until the process ends; the last one may be that it ended."""
        for check in self.checks:
            begun_s = time.monotonic()
            try:
                if self._line(min(begun_s + _START_S, deadline_s)) is None:
                    return  # the check before left CUDA unusable, and has said so
                answer = self._line(min(time.monotonic() + check.limit_s, deadline_s))
                if answer is None:
                    raise ChildProcessError(f"its process ended with code {self._process.wait()}")
            except (TimeoutError, ChildProcessError) as error:
                reason = f"{error}\n{self._last_words(hangs=isinstance(error, TimeoutError))}"
                seconds = round(time.monotonic() - begun_s, 2)
                ended = {"status": "failed", "seconds": seconds, "reason": reason, "rows": [], "broken": False}
                yield {"check": check.name, **ended}
                return
            yield answer

    def _line(self, until_s: float) -> Outcome | None:
        """Return the next line, or None at the end. Raises: TimeoutError; ChildProcessError if the start failed."""
        stdout = self._process.stdout
        assert stdout is not None
        begun_s = time.monotonic()
        while b"\n" not in self._unread:
            if not select.select([stdout], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise TimeoutError(f"no result after {time.monotonic() - begun_s:.0f} s")
            part = stdout.read(1 << 16)
            if not part:
                if code := self._process.wait():
                    raise ChildProcessError(f"its process ended with code {code}")
                return None
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        parsed: Outcome = json.loads(line)
        return parsed

    def _last_words(self, hangs: bool) -> str:
        """End of the output; a process that hangs first writes the stack of each thread."""
        if hangs and self._process.poll() is None:
            self._process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_DUMP_S)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "\n".join([line for line in lines if not line.startswith("Extension modules:")][-_LOG_LINES:])

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
