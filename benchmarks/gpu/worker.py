"""Process that runs checks: one JSON line before each check and one after it, on stdout.

A check that fails ends the process if it has left CUDA unusable; the caller starts another one for the rest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

import torch

from benchmarks.gpu.setting import NotApplicableError, Row, Setting
from midflight.report.machine import num_cores

_MAX_LINES = 14  # of a traceback
_MAX_CHARACTERS = 1800


def main() -> None:
    """Run the checks named in the argument, a JSON object."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    setting = Setting(**task["setting"])
    # Only answers go to stdout; the output of libraries goes to stderr.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        faulthandler.enable()  # the caller sends SIGABRT to a check that hangs
        torch.set_num_threads(min(16, num_cores()))
        for name, function in task["checks"]:
            print(json.dumps({"check": name, "begun": True}), file=answers, flush=True)
            answer = _run(function, setting)
            print(json.dumps({"check": name, **answer}), file=answers, flush=True)
            if answer["broken"]:
                return


def _run(function: str, setting: Setting) -> dict[str, Any]:
    started = time.perf_counter()
    status, reason, rows = "passed", "", list[Row]()
    try:
        module, _, name = function.partition(":")
        rows = getattr(importlib.import_module(module), name)(setting)
        _synchronize(setting)
    except NotApplicableError as error:
        status, reason = "skipped", str(error)
    except Exception:
        status, reason = "failed", _end_of_traceback()
    broken = status == "failed" and not _is_usable(setting)
    if status != "passed":
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()
    seconds = time.perf_counter() - started
    return {"status": status, "reason": reason, "rows": rows, "seconds": round(seconds, 2), "broken": broken}


def _synchronize(setting: Setting) -> None:
    if setting.is_cuda:
        torch.cuda.synchronize()


def _is_usable(setting: Setting) -> bool:
    """Return False after an error that every later call of CUDA would report again."""
    try:
        _synchronize(setting)
        return float(torch.ones(4, device=setting.on).sum()) == 4.0
    except RuntimeError:
        return False


def _end_of_traceback() -> str:
    lines = [line for line in traceback.format_exc().strip().splitlines() if line.strip(" ^~")]
    return "\n".join(lines[-_MAX_LINES:])[-_MAX_CHARACTERS:]


if __name__ == "__main__":
    main()
