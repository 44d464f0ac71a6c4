"""Fixture for commands that refuse invalid input."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from midflight import cli

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that runs a command in this process, expects a refusal, and returns the line on stderr."""

    def run(*arguments: object) -> str:
        capfd.readouterr()  # discard earlier output
        monkeypatch.setattr(sys, "argv", ["midflight", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        stdout, stderr = capfd.readouterr()
        assert stdout == ""
        (line,) = stderr.splitlines()
        return line

    return run
