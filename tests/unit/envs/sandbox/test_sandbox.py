"""The sandbox with well-behaved code: programs, tests, limits that can be set."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from midflight.envs.sandbox.sandbox import Sandbox, SandboxError, Statement

pytestmark = pytest.mark.slow  # every test starts processes


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(timeout_s=60) as sandbox:
        yield sandbox


def test_program_reads_its_input_and_writes_its_output(sandbox: Sandbox) -> None:
    execution = sandbox.run("import sys\nfor line in sys.stdin: print(int(line) * 2)", stdin="1\n21\n")
    assert (execution.exit_code, execution.stdout) == (0, "2\n42\n")


@pytest.mark.parametrize(
    ("code", "exit_code", "output"),
    [
        ("import sys\nprint(1)\nsys.exit()", 0, "1\n"),
        ("import sys\nprint(1)\nsys.exit(3)", 3, "1\n"),
        ("raise SystemExit('wrong')", 1, ""),
        ("print(1)\n1 / 0", 1, "1\n"),
        ("def (", 1, ""),
        ("if __name__ == '__main__': print('main')", 0, "main\n"),
        ("import threading, time\nthreading.Thread(target=lambda: print('thread')).start()", 0, "thread\n"),
        ("import atexit\natexit.register(print, 'end')", 0, "end\n"),
        ("import asyncio\nasync def main(): return 3\nprint(asyncio.run(main()))", 0, "3\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nprint(A())", 0, "A(x=1)\n"),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'x'))", 0, "1\n"),
        ("open('/dev/null', 'w').write('x')\nprint(len(open('/dev/urandom', 'rb').read(4)))", 0, "4\n"),
        ("open('x', 'w').write('x')\nprint(open('x').read())", 0, "x\n"),
        ("import os\nprint(os.listdir('.'))", 0, "[]\n"),
    ],
)
def test_program_behaves_as_a_script(sandbox: Sandbox, code: str, exit_code: int, output: str) -> None:
    execution = sandbox.run(code)
    assert (execution.exit_code, execution.stdout) == (exit_code, output), execution.stderr


def test_each_test_counts_and_preparations_do_not(sandbox: Sandbox) -> None:
    tests = [
        Statement("assert x == 1"),
        Statement("y = x + 1", counts=False),
        Statement("assert y == 3"),
        Statement("raise SystemExit"),
        Statement("assert y == 2"),
    ]
    assert sandbox.run("x = 1", tests).passed == (True, False, False, True)


def test_failed_preparation_ends_the_tests(sandbox: Sandbox) -> None:
    tests = [Statement("assert True"), Statement("1 / 0", counts=False), Statement("assert True")]
    execution = sandbox.run("", tests)
    assert execution.passed == (True,)
    assert execution.stderr == "ZeroDivisionError: division by zero\n"


def test_tests_before_an_endless_one_count(sandbox: Sandbox) -> None:
    tests = [Statement("assert True"), Statement("while True: pass"), Statement("assert True")]
    execution = sandbox.run("", tests, timeout_s=0.3)
    assert (execution.exit_code, execution.passed) == (None, (True,))


def test_equal_code_gets_equal_results(sandbox: Sandbox) -> None:
    code = "import random\nprint(random.random(), hash('text'), {'a', 'b', 'c', 'd'})"
    first = sandbox.run(code).stdout
    with Sandbox() as other:
        assert sandbox.run(code).stdout == other.run(code).stdout == first


def test_long_output_is_cut(sandbox: Sandbox) -> None:
    assert sandbox.run("print('x' * 1000)", max_output=10).stdout == "x" * 10


def test_input_may_have_any_characters(sandbox: Sandbox) -> None:
    execution = sandbox.run("print(input())", stdin="é\udc80\n")
    assert execution.exit_code == 0
    assert execution.stdout.startswith("é")


def test_memory_limit_can_be_set() -> None:
    code = "data = bytearray(100 << 20)"
    with Sandbox(memory_mb=64) as small, Sandbox(memory_mb=256) as large:
        assert small.run(code).stderr == "MemoryError\n"
        assert large.run(code).exit_code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep files away")
def test_packages_are_importable_only_if_named() -> None:
    code = "import numpy\nprint(numpy.arange(3).sum())"
    with Sandbox() as without, Sandbox(packages=["numpy"]) as with_numpy:
        assert "No module named 'numpy'" in without.run(code).stderr
        assert with_numpy.run(code).stdout == "3\n"


def test_package_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(SandboxError, match="cannot import no_such_package: ModuleNotFoundError"):
        Sandbox(packages=["no_such_package"]).protections()
