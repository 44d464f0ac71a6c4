"""Environment whose verifier does what the response says, for tests of graders."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from midflight.types import Grade, Problem


class ObedientEnvironment:
    """Environment of one turn. A response is an action of the verifier, a space, and an argument."""

    def __init__(self, error: str = "", pid_file: str = "", hang_unless: str = "") -> None:
        """Raise `error`; append the process id to `pid_file`; hang if there is no file `hang_unless` yet."""
        if error:
            raise ValueError(error)
        if pid_file:
            _append(pid_file, os.getpid())
        if hang_unless:
            _sleep_once(hang_unless)

    def problem(self, index: int) -> Problem:
        return Problem(str(index), prompt=str(index), answer="")

    def held_out_problems(self, num_problems: int) -> list[Problem]:
        return [self.problem(-1 - index) for index in range(num_problems)]

    def grade(self, problem: Problem, response: str) -> Grade:
        name, _, argument = response.partition(" ")
        result: Grade = _ACTIONS[name](argument)
        return result


class ObedientGroups(ObedientEnvironment):
    """Environment that grades whole groups; an action that raises fails its own response only."""

    def grade_group(self, problem: Problem, responses: Sequence[str]) -> Any:
        if responses[0].startswith("group "):
            return _GROUP_ACTIONS[responses[0].removeprefix("group ")](len(responses))
        grades: list[object] = []
        for response in responses:
            try:
                grades.append(self.grade(problem, response))
            except Exception as error:
                grades.append(error)
        return grades


class ObedientTurns(ObedientEnvironment):
    """Environment of several turns: `say`, `chat` and `said` return text, `count` ends with the number of turns."""

    def reset(self, problem: Problem) -> str:
        self._responses: list[str] = []
        return problem.text

    def step(self, response: str) -> Any:
        self._responses.append(response)
        name, _, argument = response.partition(" ")
        match name:
            case "say":
                return argument
            case "said":
                return ", ".join(self._responses)
            case "chat":
                return [{"role": "user", "content": argument}]
            case "chat_badly":
                return [{"role": "user"}]
            case "count":
                return Grade(float(len(self._responses)))
        return _ACTIONS[name](argument)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error within an error")


def _raise(text: str) -> None:
    raise ZeroDivisionError(text)


def _raise_unspeakable(_: str) -> None:
    raise UnspeakableError


def _sleep(pid_file: str) -> None:
    if pid_file:
        _append(pid_file, os.getpid())
    while True:
        time.sleep(60)


def _sleep_once(pid_file: str) -> Grade:
    if not os.path.exists(pid_file):
        _sleep(pid_file)
    return Grade(1.0)


def _spin(pid_file: str) -> None:
    """Loop in C with the interpreter lock held: no signal handler and no other thread of this process runs."""
    if pid_file:
        _append(pid_file, os.getpid())
    re.match(r"(a+)+$", "a" * 64 + "b")


def _close_everything(_: str) -> None:
    os.closerange(3, 1024)
    _sleep("")


def _leave_a_child(pid_file: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    _append(pid_file, child.pid)
    _sleep("")


def _square(number: int, out: Any) -> None:
    out.send(number * number)


def _square_in_a_process(number: str) -> Grade:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_square, args=(int(number), theirs))
    process.start()
    squared = ours.recv()
    process.join()
    return Grade(float(squared))


def _print(num_lines: str) -> Grade:
    for line in range(int(num_lines)):
        print("thinking", line)
        print("about", line, file=sys.stderr)
    os.write(1, b"\xff\x00 not even text\n")
    return Grade(1.0)


def _append(path: str, pid: int) -> None:
    with open(path, "a") as file:
        file.write(f"{pid}\n")


_GROUP_ACTIONS: dict[str, Callable[[int], Any]] = {
    "size": lambda size: [Grade(float(size))] * size,
    "short": lambda size: [Grade(1.0)] * (size - 1),
    "none": lambda _: None,
    "numbers": lambda size: [1.0] * size,
    "raise": lambda size: _raise(f"a group of {size}"),
}

_ACTIONS: dict[str, Callable[[str], Any]] = {
    "reward": lambda argument: Grade(float(argument)),
    "length": lambda argument: Grade(float(len(argument))),
    "pid": lambda _: Grade(1.0, {"pid": os.getpid()}),
    "many_components": lambda count: Grade(1.0, {f"component {index}": index for index in range(int(count))}),
    "raise": _raise,
    "raise_long": lambda length: _raise("x" * int(length)),
    "raise_lines": lambda _: _raise("one\ntwo\n\n  three"),
    "raise_unspeakable": _raise_unspeakable,
    "nan": lambda _: Grade(math.nan),
    "inf": lambda _: Grade(-math.inf),
    "reward_of_text": lambda _: Grade("high"),  # type: ignore[arg-type]
    "hidden_nan": lambda _: Grade(math.nan, {"reward": 1.0}),
    "text": lambda _: "good",
    "none": lambda _: None,
    "component_of_text": lambda _: Grade(1.0, {"style": "fine"}),  # type: ignore[dict-item]
    "nan_component": lambda _: Grade(1.0, {"style": math.nan}),
    "component_without_name": lambda _: Grade(1.0, {7: 1.0}),  # type: ignore[dict-item]
    "no_components": lambda _: Grade(1.0, None),  # type: ignore[arg-type]
    "system_exit": lambda code: sys.exit(int(code)),
    "sleep": _sleep,
    "sleep_once": _sleep_once,
    "spin": _spin,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "end": lambda code: os._exit(int(code)),
    "close_everything": _close_everything,
    "leave_a_child": _leave_a_child,
    "square": _square_in_a_process,
    "print": _print,
}
