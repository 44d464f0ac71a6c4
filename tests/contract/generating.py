"""Requests for a tiny model, and a loop that collects every completion."""

from __future__ import annotations

import numpy as np

from midflight.protocols import Generator
from midflight.types import Completion, GenerationRequest, RolloutId, SamplingParams

SAMPLING = SamplingParams(24, temperature=0.9, stop_token_ids=(9,))
LONG = SamplingParams(24)


def requests(num: int, sampling: SamplingParams = SAMPLING, first: int = 0) -> list[GenerationRequest]:
    prompts = [np.array([2 + index % 3, 5, 6], np.int32) for index in range(num)]
    return [GenerationRequest(RolloutId(first + i), prompt, sampling, seed=4) for i, prompt in enumerate(prompts)]


def drain(generator: Generator) -> dict[int, Completion]:
    completions: dict[int, Completion] = {}
    while generator.num_in_flight:
        completions.update({completion.rollout_id: completion for completion in generator.step()})
    return completions
