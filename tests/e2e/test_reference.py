"""Run from the command line with a reference model served by another process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from midflight.config import SHIPPED_RECIPES
from midflight.metrics.jsonl import read_metrics
from midflight.testing.tiny_models import tiny_model
from refusals import Refused

pytestmark = pytest.mark.slow

RECIPE = SHIPPED_RECIPES["cpu_demo"]
MODEL = RECIPE.parent / "models" / "chain_sums"
SMALL = ("batch.batch_size=16", "schedule.num_in_flight=16", "eval.num_problems=0", "engine.threads=1")
WITH_KL = ("loss.kl_coefficient=0.01",)

Serve = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts `midflight serve`; it returns the process and its URL."""
    with ExitStack() as stack:

        def start(*overrides: str) -> tuple[subprocess.Popen[str], str]:
            command = [sys.executable, "-m", "midflight", "serve", str(RECIPE), "serve.port=0", "engine.threads=1"]
            process = subprocess.Popen([*command, *overrides], stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout
            return process, process.stdout.readline().removeprefix("serving at ").strip()

        yield start


def train(run: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "midflight", "train", str(RECIPE), f"run.directory={run}", *SMALL, *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_served_reference_matches_the_initial_policy(serve: Serve, tmp_path: Path) -> None:
    """The KL divergence is 0 at the first step and above 0 after two steps."""
    _, url = serve()
    run = tmp_path / "run"
    process = train(run, *WITH_KL, f"reference.url={url}", "trainer.max_steps=3")
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    first, _, third = read_metrics(run / "metrics.jsonl")
    assert abs(first["kl/reference"]) < 1e-5
    assert third["kl/reference"] > 1e-5
    assert httpx.get(f"{url}/health").json()["in_flight"] == 0
    (finished,) = re.findall(r"^midflight_requests_finished_total (\d+)", httpx.get(f"{url}/metrics").text, re.M)
    assert int(finished) >= 3 * 16


def test_a_lost_reference_ends_the_run_with_one_line(serve: Serve, tmp_path: Path) -> None:
    process, url = serve()
    run = tmp_path / "run"
    training = train(run, *WITH_KL, f"reference.url={url}", "trainer.max_steps=100000")
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_bytes():
        with pytest.raises(subprocess.TimeoutExpired):
            training.wait(0.05)
    process.kill()
    _, stderr = training.communicate(timeout=240)
    assert training.returncode == 1
    (line,) = [line for line in stderr.splitlines() if line.startswith("midflight: ")]
    assert f"the reference at {url} was lost: " in line


def test_an_unsuitable_server_is_refused_before_the_run(serve: Serve, tmp_path: Path, refused: Refused) -> None:
    run = tmp_path / "run"
    training = ("train", RECIPE, f"run.directory={run}", *SMALL, *WITH_KL)
    _, short = serve("engine.max_prompt_tokens=64", "sampling.max_tokens=10")
    line = refused(*training, f"reference.url={short}")
    assert line.startswith(f"midflight: reference.url: {short} takes sequences of up to ")
    assert "engine.max_prompt_tokens + sampling.max_tokens = " in line

    other = tmp_path / "other"
    tiny_model(vocab_size=50).save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((MODEL / name).read_bytes())
    _, url = serve(f"model.path={other}")
    line = refused(*training, f"reference.url={url}")
    assert line.startswith(f"midflight: reference.url: the model of {url} has a vocabulary of 50 tokens, but model")
    assert " has 44: " in line
    assert not run.exists()


def test_an_unreachable_reference_is_a_one_line_error(tmp_path: Path, refused: Refused) -> None:
    run = f"run.directory={tmp_path / 'run'}"
    line = refused("train", RECIPE, run, *SMALL, *WITH_KL, "reference.url=http://127.0.0.1:9")
    assert line.startswith("midflight: reference.url: http://127.0.0.1:9 cannot be reached: ")
