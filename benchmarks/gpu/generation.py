"""Requests, engines and comparisons for the checks of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.setting import Row, Setting
from midflight.engine.cache import PAGE_SIZE
from midflight.engine.engine import Engine, EngineLimits
from midflight.engine.graphs import GraphedModel
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.loading import engine_model
from midflight.models.loading import weights_of
from midflight.types import Completion, GenerationRequest, RolloutId, SamplingParams

# Float32 sums in another order differ by about 1e-6; TF32 would differ by about 1e-3.
LOGPROB_TOLERANCE = 1e-4
_MAX_PROMPT = 70
_NEW_TOKENS = 24
_CPU = torch.device("cpu")


def requests(
    count: int, vocab_size: int, *, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0, first_id: int = 0
) -> list[GenerationRequest]:
    """Return requests with prompts of 2 to 69 tokens; every fourth one has the prompt of the first."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, vocab_size, rng.integers(2, _MAX_PROMPT)).astype(np.int32) for _ in range(count)]
    return [
        GenerationRequest(
            RolloutId(first_id + index),
            prompts[0 if index % 4 == 3 else index],
            SamplingParams(_NEW_TOKENS, temperature, top_p=top_p),
            seed,
        )
        for index in range(count)
    ]


def engine_on(
    setting: Setting,
    model: Any,
    *,
    graphs: bool = True,
    fused: bool = True,
    version: int = 0,
    recompute_kv: bool = False,
    max_num_seqs: int = 11,
    kv_cache_bytes: int | None = None,
) -> Engine:
    """Build the engine that is checked. In a rehearsal on the CPU, a function call takes the place of a graph."""
    limits = _limits(max_num_seqs, kv_cache_bytes)
    kernels = None if setting.is_cuda else ReferenceKernels()
    runner = engine_model(
        model.config, weights_of(model), max_length=limits.max_length, device=setting.on, kernels=kernels, fused=fused
    )
    if graphs and not setting.is_cuda:
        runner = GraphedModel(runner, -(-limits.max_length // PAGE_SIZE), lambda run: run)
    return Engine(runner, limits, version=version, recompute_kv=recompute_kv, cuda_graphs=graphs)


def engine_on_cpu(model: Any, *, fused: bool = True, version: int = 0, recompute_kv: bool = False) -> Engine:
    """Build the engine to compare with."""
    limits = _limits(11, None)
    runner = engine_model(model.config, weights_of(model), max_length=limits.max_length, device=_CPU, fused=fused)
    return Engine(runner, limits, version=version, recompute_kv=recompute_kv)


def _limits(max_num_seqs: int, kv_cache_bytes: int | None) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=max_num_seqs,
        max_prompt_tokens=_MAX_PROMPT,
        max_new_tokens=_NEW_TOKENS,
        max_batched_tokens=100,  # prefills are split, and share their steps with decoding sequences
        kv_cache_bytes=kv_cache_bytes,
    )


def run_to_end(engine: Engine) -> dict[int, Completion]:
    """Step until nothing is in flight; return the completions by rollout."""
    completions: dict[int, Completion] = {}
    while engine.num_in_flight:
        completions |= {completion.rollout_id: completion for completion in engine.step()}
    return completions


def generate(engine: Engine, asked: list[GenerationRequest]) -> dict[int, Completion]:
    engine.add(asked)
    return run_to_end(engine)


def compare(actual: Mapping[int, Completion], expected: Mapping[int, Completion], what: str) -> Row:
    """Compare tokens, versions and log-probabilities. Raises: AssertionError naming the first difference."""
    assert actual.keys() == expected.keys(), f"{what}: other requests have ended"
    largest, num_tokens = 0.0, 0
    for rollout_id, completion in expected.items():
        ours, theirs = actual[rollout_id].generated, completion.generated
        where = f"{what}, request {rollout_id}"
        same = ours.token_ids[: len(theirs)] == theirs.token_ids[: len(ours)]
        if not same.all() or len(ours) != len(theirs):
            at = int(np.argmin(same)) if not same.all() else len(same)
            raise AssertionError(
                f"{where}, token {at}: {ours.token_ids[at : at + 3]} with log-probabilities"
                f" {ours.logprobs[at : at + 3]}, expected {theirs.token_ids[at : at + 3]} with"
                f" {theirs.logprobs[at : at + 3]}"
            )
        assert (ours.weight_versions == theirs.weight_versions).all(), f"{where}: {ours.weight_versions}"
        # A maximum of NaN is NaN, which is not below the tolerance.
        difference = float(np.max(np.abs(ours.logprobs - theirs.logprobs)))
        assert difference <= LOGPROB_TOLERANCE, f"{where}: log-probabilities differ by {difference:.2e}"
        largest, num_tokens = max(largest, difference), num_tokens + len(theirs)
    return {"case": what, "tokens": num_tokens, "largest_logprob_difference": largest}
