"""Body of a job: run the generated code in this process, then its tests, and report each test that passed."""

from __future__ import annotations

import atexit
import io
import os
import random
import sys
import threading
import traceback
from types import ModuleType
from typing import Any, NoReturn

RESULTS = 3  # file descriptor of the results: the job's token and "1" or "0" for each test
_FILE_NAME = "<response>"


def run(code: str, tests: list[tuple[bool, str]] | None, token: str) -> NoReturn:
    """Run the code as a program (`tests` is None), or as a module and then its tests; end the process.

    Each test is a statement, with False if it only prepares the tests that follow. A statement that prepares and fails
    ends the job.
    """
    atexit._clear()
    random.seed(0)  # equal responses get equal rewards
    sys.argv = ["response.py"]
    sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))
    module = ModuleType("__main__" if tests is None else "response")
    sys.modules[module.__name__] = module
    exit_code = _execute(code, _FILE_NAME, module.__dict__)
    if tests is None:
        exit_code = _finish_program(exit_code)
    elif exit_code == 0:
        _run_tests(tests, module.__dict__, token)
    for stream in (sys.stdout, sys.stderr):
        _quietly(stream.flush)
    os._exit(exit_code)


def _run_tests(tests: list[tuple[bool, str]], names: dict[str, Any], token: str) -> None:
    for counts, source in tests:
        passed = _execute(source, "<tests>", names) == 0
        if counts:
            os.write(RESULTS, f"{token}{passed:d}".encode())
        elif not passed:
            return


def _execute(source: str, name: str, names: dict[str, Any]) -> int:
    """Execute the source and return its exit code, as Python does for a script."""
    try:
        exec(compile(source, name, "exec", dont_inherit=True), names)
    except SystemExit as error:
        code = error.code
        if code is None or isinstance(code, int):
            return code or 0 if name == _FILE_NAME else 1
        _quietly(lambda: print(code, file=sys.stderr))
        return 1
    except BaseException as error:
        lines = traceback.format_exception_only(error)
        _quietly(lambda: print(lines[-1].strip(), file=sys.stderr))
        return 1
    return 0


def _finish_program(exit_code: int) -> int:
    """Wait for threads and call exit functions, as the interpreter does at the end of a script."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    _quietly(atexit._run_exitfuncs)
    return exit_code


def _quietly(action: Any) -> None:
    """Call a function of the generated code, which may fail in any way."""
    try:
        action()
    except BaseException:
        return


def _stream(descriptor: int) -> io.TextIOWrapper:
    mode = "rb" if descriptor == 0 else "wb"
    return io.TextIOWrapper(os.fdopen(descriptor, mode, closefd=False), encoding="utf-8", errors="surrogateescape")
