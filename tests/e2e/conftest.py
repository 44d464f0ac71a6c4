"""Commands that end at once because their input is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from midflight import cli

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Run a command in this process, which has imported everything; return the one line on stderr."""

    def run(*arguments: object) -> str:
        capfd.readouterr()  # of the test so far
        monkeypatch.setattr(sys, "argv", ["midflight", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    return run
