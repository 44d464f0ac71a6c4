"""Prompts scored by the engine, compared with the forward pass of the trainer, under load and updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from midflight.engine import engine as engine_module
from midflight.engine.cache import page_bytes
from midflight.engine.engine import Engine
from midflight.models.attention import PACKED_ATTENTION
from midflight.models.loading import weights_of
from midflight.models.policy import PackedPolicy
from midflight.preprocess.packing import pack
from midflight.testing.tiny_models import VOCAB_SIZE, stage_and_adopt, tiny_engine, tiny_model
from midflight.types import Completion, FinishReason, GenerationRequest, RolloutId, SamplingParams, Trajectory
from narrowing import present

LONGEST = 56  # tokens: 32 in the prompt, 24 in the response


def to_score(
    count: int, *, max_tokens: int = 0, first_id: int = 100, temperature: float = 0.7
) -> list[GenerationRequest]:
    rng = np.random.default_rng(3)
    longest = 32 if max_tokens else LONGEST
    lengths = [1, 2, 16, 17, longest, *rng.integers(1, longest, count)][:count]
    sampling = SamplingParams(max_tokens, temperature)
    return [
        GenerationRequest(
            RolloutId(first_id + index), rng.integers(0, VOCAB_SIZE, length).astype(np.int32), sampling, 0,
            score_prompt=True,
        )
        for index, length in enumerate(lengths)
    ]  # fmt: skip


def neighbors(count: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(5)
    prompts = rng.integers(0, VOCAB_SIZE, (count, 9)).astype(np.int32)
    return [GenerationRequest(RolloutId(each), prompt, SamplingParams(24), 0) for each, prompt in enumerate(prompts)]


def trainer_logprobs(model: Any, token_ids: np.ndarray, temperature: float = 0.7) -> np.ndarray:
    """Return the log-probability of every token but the first."""
    zeros = np.zeros(len(token_ids), np.float32)
    scored = np.arange(len(token_ids)) > 0
    trajectory = Trajectory(RolloutId(0), token_ids, scored, zeros, zeros.astype(np.int32), zeros, 0.0, 0)
    (microbatch,) = pack([trajectory], 1000)
    model.set_attn_implementation(PACKED_ATTENTION)
    with torch.no_grad():
        logprobs: np.ndarray = PackedPolicy(model, temperature)(microbatch)[0].logprobs.numpy()
    return logprobs


def run_to_end(engine: Engine) -> dict[int, Completion]:
    completions: dict[int, Completion] = {}
    while engine.num_in_flight:
        completions.update({completion.rollout_id: completion for completion in engine.step()})
    return completions


def assert_scored(model: Any, request: GenerationRequest, completion: Completion, version: int = 0) -> None:
    prompt = completion.prompt
    assert prompt is not None
    assert prompt.token_ids.tolist() == request.prompt_token_ids.tolist()
    assert np.isnan(prompt.logprobs[0])
    assert set(prompt.weight_versions.tolist()) == {version}
    if len(prompt) > 1:
        np.testing.assert_allclose(prompt.logprobs[1:], trainer_logprobs(model, prompt.token_ids), atol=1e-4)


FAMILIES = [("llama", True), ("qwen2", True), ("qwen3", True), ("llama", False), ("gpt2", False), ("gemma2", False)]


@pytest.mark.parametrize("max_logits", [1 << 25, 5 * VOCAB_SIZE])
@pytest.mark.parametrize(("family", "fused"), FAMILIES)
def test_scores_match_the_trainer(monkeypatch: pytest.MonkeyPatch, family: str, fused: bool, max_logits: int) -> None:
    """Prompts are scored beside sampled sequences, in arbitrary chunks, and again from the prefix cache."""
    monkeypatch.setattr(engine_module, "_MAX_SCORED_LOGITS", max_logits)
    model = tiny_model(family)
    engine = tiny_engine(model, fused=fused, max_batched_tokens=21)
    asked = to_score(12)
    again = [replace(request, rollout_id=RolloutId(request.rollout_id + 50)) for request in asked]
    engine.add([*neighbors(4), *asked, *again])
    completions = run_to_end(engine)
    assert len(completions) == 28
    for request in [*asked, *again]:
        completion = completions[request.rollout_id]
        assert len(completion.generated) == 0
        assert completion.finish_reason is FinishReason.LENGTH
        assert_scored(model, request, completion)
    alone = tiny_engine(model, fused=fused)
    alone.add(neighbors(4))
    for rollout_id, expected in run_to_end(alone).items():
        assert completions[rollout_id].generated.token_ids.tolist() == expected.generated.token_ids.tolist()
        assert completions[rollout_id].prompt is None


def test_a_scored_prompt_continues_as_an_unscored_one() -> None:
    model = tiny_model()
    asked = to_score(10, max_tokens=24)
    plain, scoring = tiny_engine(model), tiny_engine(model)
    plain.add([replace(request, score_prompt=False) for request in asked])
    scoring.add(asked)
    expected, completions = run_to_end(plain), run_to_end(scoring)
    for request in asked:
        completion = completions[request.rollout_id]
        assert completion.generated.token_ids.tolist() == expected[request.rollout_id].generated.token_ids.tolist()
        assert_scored(model, request, completion)


def test_greedy_requests_are_scored_at_temperature_one() -> None:
    model, (*_, request) = tiny_model(), to_score(5, temperature=0.0)
    engine = tiny_engine(model)
    engine.add([request])
    (completion,) = run_to_end(engine).values()
    expected = trainer_logprobs(model, request.prompt_token_ids, temperature=1.0)
    np.testing.assert_allclose(present(completion.prompt).logprobs[1:], expected, atol=1e-4)


def test_preempted_prompts_are_scored_again() -> None:
    model = tiny_model()
    one_page = page_bytes(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    engine = tiny_engine(model, max_new_tokens=100, kv_cache_bytes=14 * one_page, max_batched_tokens=16)
    asked = to_score(10)
    engine.add([*(replace(each, sampling=SamplingParams(100)) for each in neighbors(3)), *asked])
    completions = run_to_end(engine)
    assert engine.num_preempted
    for request in asked:
        assert_scored(model, request, completions[request.rollout_id])


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_an_update_restarts_a_half_scored_prompt(recompute_kv: bool) -> None:
    """A scored prompt with a response in flight keeps its scores, unless `recompute_kv` computes everything again."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = tiny_engine(old, max_batched_tokens=16, recompute_kv=recompute_kv)
    (continued,) = to_score(1, max_tokens=24, first_id=0)
    continued = replace(continued, prompt_token_ids=np.arange(10, dtype=np.int32))
    half_scored = to_score(5)[-1]
    engine.add([continued, half_scored])
    engine.step()
    engine.step()
    assert len(engine.generated(continued.rollout_id)) == 2
    stage_and_adopt(engine, 4, weights_of(new))
    completions = run_to_end(engine)
    assert_scored(new, half_scored, completions[half_scored.rollout_id], version=4)
    kept = (new, 4) if recompute_kv else (old, 0)
    assert_scored(kept[0], continued, completions[0], kept[1])
    assert completions[0].generated.weight_versions.tolist() == [0] * 2 + [4] * 22


def test_an_aborted_prompt_has_no_partial_scores() -> None:
    model = tiny_model()
    engine = tiny_engine(model, max_batched_tokens=16)
    (*_, request) = to_score(5)
    engine.add([request])
    engine.step()
    (aborted,) = engine.abort([request.rollout_id])
    assert aborted.finish_reason is FinishReason.ABORT
    assert aborted.prompt is None
    engine.add([request])
    (completion,) = run_to_end(engine).values()
    assert_scored(model, request, completion)
