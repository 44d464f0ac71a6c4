"""Command `python -m benchmarks streams`, with a small load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "streams", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_every_stream_type_is_measured() -> None:
    done = bench("--records", "2000", "--record-bytes", "100", "--batch", "1,7", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = [(row["stream"], row["batch"], "server_peak_mib" in row) for row in result["rows"]]
    assert rows == [("sqlite", 1, False), ("sqlite", 7, False), ("redis", 1, True), ("redis", 7, True)]
    for row in result["rows"]:
        assert row["records_per_s"] > 0
        assert row["reader_growth_mib"] >= 0
        assert row["writer_growth_mib"] >= 0
    assert (result["records"], result["record_bytes"]) == (2000, 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--streams", "kafka"], "benchmarks: --streams: there is no 'kafka'; known are sqlite, redis"),
        (["--streams", "redis", "--redis-url", "http://x"], "not a Redis URL"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str) -> None:
    done = bench(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
