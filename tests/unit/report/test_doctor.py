"""`midflight doctor`: each check of the machine, on this one and on worse ones."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

from midflight import cli
from midflight.report import doctor
from midflight.report.doctor import Check, check_machine, obstacles, print_checks


def checks_by_name(directory: Path) -> dict[str, Check]:
    return {check.name: check for check in check_machine(directory)}


def test_training_works_on_the_machine_of_these_tests(tmp_path: Path) -> None:
    checks = check_machine(tmp_path)
    assert obstacles(checks) == []
    names = [check.name for check in checks]
    assert names == list(dict.fromkeys(names))
    assert all(check.remedy for check in checks if check.state != "ok")
    assert all(not check.remedy for check in checks if check.state == "ok")


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [("PATH", "/nowhere", "no cc, no gcc"), ("CC", "/nowhere/cc -m64", "/nowhere/cc -m64 does not run")],
)
def test_a_missing_compiler_limits_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, found: str
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv(variable, value)
    checks = checks_by_name(tmp_path)
    assert (checks["C compiler"].found, checks["C compiler"].state) == (found, "limited")
    assert "install gcc or clang, or set CC" in checks["C compiler"].remedy
    assert obstacles(list(checks.values())) == []


def test_a_broken_torch_prevents_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    checks = check_machine(tmp_path)
    assert [(check.name, check.remedy) for check in obstacles(checks)] == [("torch", "pip install torch")]


def test_a_directory_without_room_and_permission_prevents_training() -> None:
    assert [check.name for check in obstacles(check_machine(Path("/proc")))] == ["disk", "write permission"]


def test_few_open_files_limit_training(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        check = checks_by_name(tmp_path)["open files"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert check == Check("open files", "at most 256", "limited", "ulimit -n 4096")


def test_machine_without_sandbox_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"kind": "limits", "files": "", "network": "", "processes": "none", "memory": "RLIMIT_AS", "time": "wall"}
    monkeypatch.setattr(doctor, "protections", lambda: found)
    check = checks_by_name(tmp_path)["sandbox (reward `code`)"]
    assert (check.found, check.state) == ("limits: processes, memory, time", "limited")
    assert "generated code can reach files, network" in check.remedy
    assert obstacles([check]) == []


def test_each_check_is_one_line_and_keeps_its_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    print_checks(
        [
            Check("deepspeed", "none", "missing", "pip install 'midflight[deepspeed]'"),
            Check("torch", "broken", "missing", "pip install torch", required=True),
        ]
    )
    _, deepspeed, torch, _, verdict = capsys.readouterr().out.splitlines()
    assert deepspeed.split() == ["deepspeed", "none", "missing", "pip", "install", "'midflight[deepspeed]'"]
    assert torch.startswith("torch")
    assert verdict == "Training does not work here: torch"


@pytest.mark.parametrize(("directory", "code"), [("/tmp", 0), ("/proc", 1)])
def test_the_exit_code_says_if_training_works(
    directory: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "argv", ["midflight", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code or 0) == code
    rows = json.loads(capsys.readouterr().out)
    assert {row["state"] for row in rows} <= {"ok", "limited", "missing"}
    assert rows[0] == {
        "name": "Python",
        "found": sys.version.split()[0],
        "state": "ok",
        "remedy": "",
        "required": False,
    }
