"""One end of the HTTP connection is killed: the other continues, and no received token is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from midflight.config import SHIPPED_RECIPES
from midflight.errors import GenerationLostError
from midflight.generation.client import HTTPGenerator
from midflight.types import FinishReason, GenerationRequest, RolloutId, SamplingParams

pytestmark = pytest.mark.slow

RECIPE = SHIPPED_RECIPES["cpu_demo"]


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
