"""One end of the HTTP connection is killed: the other continues, and no received token is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from midflight.config import SHIPPED_RECIPES
from midflight.errors import GenerationLostError, WeightUpdateError
from midflight.generation.client import HTTPGenerator
from midflight.models.loading import load_model, weights_of
from midflight.types import FinishReason, GenerationRequest, RolloutId, SamplingParams

pytestmark = pytest.mark.slow

RECIPE = SHIPPED_RECIPES["cpu_demo"]
MODEL = RECIPE.parent / "models" / "chain_sums"


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "midflight", "serve", str(RECIPE), "serve.port=0", "engine.threads=1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield process, process.stdout.readline().removeprefix("serving at ").strip()
    finally:
        process.kill()
        process.communicate()


def test_a_killed_server_loses_no_received_token(served: tuple[subprocess.Popen[str], str]) -> None:
    process, url = served
    prompt = np.array([5, 6], np.int32)
    with HTTPGenerator(url, chunk_tokens=1) as generator:
        # No stop token: every rollout is far from its 160 tokens when the server is killed.
        generator.add([GenerationRequest(RolloutId(each), prompt, SamplingParams(160), seed=1) for each in range(32)])
        while len(generator.generated(RolloutId(0))) < 5:
            pass
        process.kill()
        ended = 0

        def step_until_lost() -> None:
            nonlocal ended
            while True:
                ended += len(generator.step())

        with pytest.raises(GenerationLostError):
            step_until_lost()
        partial = generator.abort([RolloutId(each) for each in range(32)])
        assert len(partial) + ended == 32
        for completion in partial:
            assert completion.finish_reason is FinishReason.ABORT
            assert len(completion.generated) >= (5 if completion.rollout_id == 0 else 0)
        assert generator.num_in_flight == 0
        with pytest.raises(GenerationLostError):
            generator.add([GenerationRequest(RolloutId(0), prompt, SamplingParams(8), seed=1)])


SENDER = """
import os, signal, sys
from pathlib import Path
from midflight.generation.client import HTTPGenerator
from midflight.models.loading import load_model, weights_of

class KilledWhilePacking(dict):
    def __getitem__(self, name):
        if name == list(self)[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)

weights = weights_of(load_model(Path(sys.argv[2])))
HTTPGenerator(sys.argv[1], bucket_bytes=4096).update_weights(1, KilledWhilePacking(weights))
"""


def test_a_killed_sender_keeps_the_old_weights(
    served: tuple[subprocess.Popen[str], str],
) -> None:
    _, url = served
    sender = subprocess.run([sys.executable, "-c", SENDER, url, str(MODEL)], timeout=120)
    assert sender.returncode == -9
    with HTTPGenerator(url) as generator:
        assert generator.weight_version == 0
        generator.add([GenerationRequest(RolloutId(0), np.array([5], np.int32), SamplingParams(8), seed=1)])
        while not (completions := generator.step()):
            pass
        assert set(completions[0].generated.weight_versions.tolist()) == {0}
        weights = weights_of(load_model(MODEL))
        while generator.weight_version == 0:
            with suppress(WeightUpdateError):  # the server may not have noticed the loss yet
                generator.update_weights(2, weights)
        assert generator.weight_version == 2
