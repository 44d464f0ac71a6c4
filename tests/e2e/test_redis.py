"""Run with streams in a real Redis."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.redis_server import RedisServer

from midflight.config import SHIPPED_RECIPES

RECIPE = SHIPPED_RECIPES["cpu_demo"]
SMALL = ("batch.batch_size=16", "batch.group_size=4", "schedule.num_in_flight=16", "eval.num_problems=0")


def train(*arguments: str | Path, url: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "midflight", "train", *map(str, arguments), "--json"]
    environment = os.environ | ({"MIDFLIGHT_REDIS_URL": url} if url else {})
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.faults
@pytest.mark.slow
def test_a_run_resumes_after_a_restart_of_redis(tmp_path: Path) -> None:
    """The server needs a password, which no file in the run directory contains."""
    run, data = tmp_path / "run", tmp_path / "redis"
    data.mkdir()
    with RedisServer(data, password="open-sesame") as server:
        url = server.url.replace("://", "://:open-sesame@")
        reference = ("loss.kl_coefficient=0.01", "preprocess.num_workers=2")
        settings = ("streams.type=redis", *reference, "trainer.max_steps=4", *SMALL)
        refused = train(RECIPE, f"run.directory={run}", *settings, url=server.url)
        assert refused.returncode == 2
        assert "asks for a password, or another one: redis://:PASSWORD@..." in refused.stderr.splitlines()[-1]
        assert not run.exists()
        started = train(RECIPE, f"run.directory={run}", *settings, url=url)
        assert started.returncode == 0, started.stderr
        server.kill()
        server.start()
        resumed = train(run, "--resume", "trainer.max_steps=7", url=url)
        assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout)
    groups = summary["groups"]
    assert (summary["steps"], groups["trained"]) == (7, 7 * 4)
    assert groups["started"] == sum(groups[key] for key in ("trained", "dropped", "failed", "unfinished"))
    assert not any(b"open-sesame" in path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert sorted(path.name for path in (run / "streams").iterdir() if path.suffix == ".sqlite") == ["partials.sqlite"]


@pytest.mark.slow
def test_an_unreachable_redis_is_a_one_line_error(tmp_path: Path) -> None:
    done = train(RECIPE, f"run.directory={tmp_path / 'run'}", "streams.type=redis", "streams.url=redis://127.0.0.1:1")
    assert done.returncode == 2
    assert re.match(r"midflight: streams: midflight:check:\d+ in Redis at 127.0.0.1:1 cannot be reached: ", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
