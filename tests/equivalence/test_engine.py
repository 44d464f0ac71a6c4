"""Engine compared with plain transformers, and with itself under interruptions and other batch compositions."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from midflight.engine.cache import KVCache, page_bytes
from midflight.engine.engine import Engine, EngineLimits
from midflight.engine.graphs import GraphedModel
from midflight.engine.kernels.reference import ReferenceKernels
from midflight.engine.loading import engine_model
from midflight.engine.plan import Batch
from midflight.errors import NonFiniteWeightsError, RequestError
from midflight.models.loading import weights_of
from midflight.protocols import IncomingWeights
from midflight.testing.tiny_models import VOCAB_SIZE, stage_and_adopt, tiny_engine, tiny_model
from midflight.types import Completion, FinishReason, GenerationRequest, RolloutId, SamplingParams

STOP = 1


def requests(
    count: int,
    *,
    max_tokens: int = 24,
    temperature: float = 1.0,
    seed: int = 0,
    shared_prompt: bool = False,
    first_id: int = 0,
) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB_SIZE, rng.integers(2, 30)).astype(np.int32) for _ in range(count)]
    sampling = SamplingParams(max_tokens, temperature, (STOP,))
    return [
        GenerationRequest(RolloutId(first_id + index), prompts[0 if shared_prompt else index], sampling, seed)
        for index in range(count)
    ]


def run_to_end(engine: Engine) -> dict[int, Completion]:
    completions: dict[int, Completion] = {}
    while engine.num_in_flight:
        completions.update({completion.rollout_id: completion for completion in engine.step()})
    return completions


def plain_logprobs(model: Any, prompt: np.ndarray, generated: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probability of each generated token by transformers: one sequence, no cache, its own attention."""
    model.set_attn_implementation("eager")
    tokens = torch.from_numpy(np.concatenate([prompt, generated])).long()
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0] / temperature
    predicted = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return predicted.gather(1, tokens[len(prompt) :, None]).squeeze(1).numpy()


LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
ENGINES = [
    *(("llama", options, True) for options in ({}, {"tie_word_embeddings": True}, {"attention_bias": True})),
    *(("qwen2", options, True) for options in ({}, {"num_key_value_heads": 4}, {"head_dim": 16})),
    *(("qwen3", options, True) for options in ({}, {"head_dim": 16, "attention_bias": True})),
    # The model's own module, with the engine's attention plugged in.
    *((family, {}, False) for family in ("llama", "qwen3", "gpt2", "gemma2", "gemma3")),
    *(("llama", {"rope_parameters": LINEAR_ROPE}, fused) for fused in (True, False)),
    ("qwen2", {"rope_parameters": YARN_ROPE}, True),
]


@pytest.mark.parametrize("kernels", [None, ReferenceKernels()], ids=["best", "reference"])
@pytest.mark.parametrize(("family", "options", "fused"), ENGINES)
def test_logprobs_match_transformers(
    family: str, options: dict[str, Any], fused: bool, kernels: ReferenceKernels | None
) -> None:
    """Covers staggered admission, prefill chunks that end inside pages, decoding and shared prefixes."""
    model = tiny_model(family, **options)
    asked = requests(20, temperature=0.7) + requests(4, temperature=0.7, shared_prompt=True, first_id=20)
    engine = tiny_engine(model, kernels=kernels, fused=fused, max_batched_tokens=21)
    engine.add(asked)
    completions = run_to_end(engine)
    assert len(completions) == 24
    for request in asked:
        generated = completions[request.rollout_id].generated
        expected = plain_logprobs(model, request.prompt_token_ids, generated.token_ids, temperature=0.7)
        np.testing.assert_allclose(generated.logprobs, expected, atol=1e-4)


def test_greedy_sampling_takes_the_most_likely_token() -> None:
    model = tiny_model()
    asked = requests(4, temperature=0.0)
    engine = tiny_engine(model)
    engine.add(asked)
    completions = run_to_end(engine)
    for request in asked:
        generated = completions[request.rollout_id].generated
        tokens = torch.from_numpy(np.concatenate([request.prompt_token_ids, generated.token_ids])).long()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            best = model(input_ids=tokens[None]).logits[0].argmax(-1)[len(request.prompt_token_ids) - 1 : -1]
        assert best.tolist() == generated.token_ids.tolist()


def test_batch_composition_does_not_change_tokens() -> None:
    """A rollout gets the same tokens alone, in a large batch, and with few slots."""
    asked = requests(24)
    crowd = tiny_engine(tiny_model(), max_num_seqs=24)
    crowd.add(asked)
    few_slots = tiny_engine(tiny_model(), max_num_seqs=3)
    few_slots.add(list(reversed(asked)))
    in_crowd, in_few_slots = run_to_end(crowd), run_to_end(few_slots)
    for request in asked:
        alone = tiny_engine(tiny_model(), max_num_seqs=1)
        alone.add([request])
        expected = run_to_end(alone)[request.rollout_id].generated.token_ids.tolist()
        assert in_crowd[request.rollout_id].generated.token_ids.tolist() == expected
        assert in_few_slots[request.rollout_id].generated.token_ids.tolist() == expected


def test_resumed_sequences_match_uninterrupted_ones() -> None:
    asked = requests(6)
    undisturbed = tiny_engine(tiny_model())
    undisturbed.add(asked)
    expected = run_to_end(undisturbed)

    first = tiny_engine(tiny_model())
    first.add(asked)
    finished = [completion for _ in range(5) for completion in first.step()]
    aborted = first.abort([request.rollout_id for request in asked])
    assert first.num_in_flight == 0
    assert len(finished) + len(aborted) == 6
    second = tiny_engine(tiny_model(), max_num_seqs=2)
    for completion in aborted:
        assert completion.finish_reason is FinishReason.ABORT
        request = asked[completion.rollout_id]
        resumed = GenerationRequest(
            request.rollout_id, request.prompt_token_ids, request.sampling, request.seed, completion.generated
        )
        second.add([resumed])
    for rollout_id, completion in run_to_end(second).items():
        assert completion.generated.token_ids.tolist() == expected[rollout_id].generated.token_ids.tolist()
        np.testing.assert_allclose(completion.generated.logprobs, expected[rollout_id].generated.logprobs, atol=1e-5)


def test_later_turns_continue_the_random_numbers() -> None:
    """With sampled tokens moved into the prompt, the response continues as if it was resumed."""
    asked = requests(6)
    engine = tiny_engine(tiny_model())
    engine.add(asked)
    expected = run_to_end(engine)
    for request in asked:
        whole = expected[request.rollout_id].generated
        num_before = len(whole) // 2
        if not num_before:
            continue
        context = np.concatenate([request.prompt_token_ids, whole.token_ids[:num_before]])
        room = replace(request.sampling, max_tokens=request.sampling.max_tokens - num_before)
        engine.add([replace(request, prompt_token_ids=context, sampling=room, first_position=num_before)])
    later = run_to_end(engine)
    assert len(later) >= 3
    for rollout_id, completion in later.items():
        whole = expected[rollout_id].generated
        assert completion.generated.token_ids.tolist() == whole.token_ids[len(whole) // 2 :].tolist()
        assert completion.finish_reason is expected[rollout_id].finish_reason
    with pytest.raises(RequestError, match="its prompt has 50 tokens, not 1 to 32"):
        engine.add([replace(asked[0], prompt_token_ids=np.full(50, 2, np.int32), first_position=4)])


def test_update_in_flight_keeps_tokens_and_cached_keys() -> None:
    """Compare with transformers and an explicit cache: old keys and values, new weights from the update on."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    (request,) = requests(1, max_tokens=12)
    engine = tiny_engine(old, version=7)
    engine.add([request])
    num_before = 5
    for _ in range(num_before):
        assert engine.step() == []
    stage_and_adopt(engine, 8, weights_of(new))
    generated = run_to_end(engine)[0].generated
    assert generated.weight_versions.tolist() == [7] * num_before + [8] * (len(generated) - num_before)

    tokens = torch.from_numpy(np.concatenate([request.prompt_token_ids, generated.token_ids])).long()[None]
    for model in (old, new):
        model.set_attn_implementation("eager")
    cache = DynamicCache(config=old.config)
    # The last token sampled by the old weights is the first one the new weights read.
    num_old = len(request.prompt_token_ids) + num_before - 1
    with torch.no_grad():
        old_logits = old(input_ids=tokens[:, :num_old], past_key_values=cache, use_cache=True).logits[0]
        new_logits = [
            new(input_ids=tokens[:, [position]], past_key_values=cache, use_cache=True).logits[0]
            for position in range(num_old, tokens.shape[1] - 1)
        ]
    logprobs = torch.log_softmax(torch.cat([old_logits, *new_logits]), -1)
    expected = logprobs[len(request.prompt_token_ids) - 1 :].gather(1, tokens[0, len(request.prompt_token_ids) :, None])
    np.testing.assert_allclose(generated.logprobs, expected.squeeze(1).numpy(), atol=1e-4)


def test_prefixes_are_never_shared_across_versions() -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    asked = requests(4, shared_prompt=True)
    engine = tiny_engine(old)
    engine.add(asked[:2])
    engine.step()
    stage_and_adopt(engine, 1, weights_of(new))
    engine.add(asked[2:])
    completions = run_to_end(engine)

    fresh = tiny_engine(new, version=1)
    fresh.add(asked[2:])
    for rollout_id, expected in run_to_end(fresh).items():
        assert completions[rollout_id].generated.token_ids.tolist() == expected.generated.token_ids.tolist()
        np.testing.assert_allclose(completions[rollout_id].generated.logprobs, expected.generated.logprobs, atol=1e-5)


@pytest.mark.parametrize("kernels", [None, ReferenceKernels()], ids=["best", "reference"])
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2"])
def test_nan_in_unused_cache_slots_changes_nothing(family: str, kernels: ReferenceKernels | None) -> None:
    model, asked = tiny_model(family), requests(12)
    fresh, poisoned = (tiny_engine(model, kernels=kernels, max_batched_tokens=21) for _ in range(2))
    poisoned._cache._pages.fill_(torch.nan)
    for engine in (fresh, poisoned):
        engine.add(asked)
    actual, expected = run_to_end(poisoned), run_to_end(fresh)
    for rollout_id, completion in expected.items():
        assert np.isfinite(completion.generated.logprobs).all()
        assert actual[rollout_id].generated.token_ids.tolist() == completion.generated.token_ids.tolist()
        assert actual[rollout_id].generated.logprobs.tolist() == completion.generated.logprobs.tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_updates_are_refused(bad: float) -> None:
    """The old weights keep serving, and the next good weights serve as in a fresh engine."""
    old, good = tiny_model(seed=0), weights_of(tiny_model(seed=1))
    name = "model.layers.1.mlp.down_proj.weight"
    broken = {**good, name: good[name].clone()}
    broken[name][-1, -1] = bad
    asked = requests(6)
    undisturbed, engine = tiny_engine(old), tiny_engine(old)
    for each in (undisturbed, engine):
        each.add(asked)
        each.step()
    with pytest.raises(NonFiniteWeightsError, match=f"version 1 of the weights is refused: {name} has NaN"):
        stage_and_adopt(engine, 1, broken)
    engine.adopt(1)
    assert_same(run_to_end(engine), run_to_end(undisturbed))
    assert engine.weight_version == 0
    stage_and_adopt(engine, 2, good)
    fresh = tiny_engine(tiny_model(seed=1), version=2)
    for each in (fresh, engine):
        each.add(asked)
    assert_same(run_to_end(engine), run_to_end(fresh))


def test_nonfinite_initial_weights_are_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 3] = torch.nan
    with pytest.raises(NonFiniteWeightsError, match=r"model\.embed_tokens\.weight has NaN"):
        tiny_engine(model)


def test_versions_never_decrease_within_a_sequence() -> None:
    weights = weights_of(tiny_model(seed=1))
    engine = tiny_engine(tiny_model(), version=5)
    engine.add(requests(1))
    engine.step()
    stage_and_adopt(engine, 4, weights)
    engine.step()
    assert engine.weight_version == 5
    engine.stage(IncomingWeights(4, 4, weights.items(), lineage="resumed from an older checkpoint"))
    engine.adopt(4)
    assert set(run_to_end(engine)[0].generated.weight_versions) == {5}
    engine.step()  # nothing is in flight any more
    assert engine.weight_version == 4


def test_updates_under_load_lose_no_sequence() -> None:
    models = [tiny_model(seed=seed) for seed in range(3)]
    asked = requests(40)
    engine = tiny_engine(models[0])
    engine.add(asked)
    completions: dict[int, Completion] = {}
    version = 0
    while engine.num_in_flight:
        completions.update({completion.rollout_id: completion for completion in engine.step()})
        version += 1
        stage_and_adopt(engine, version, weights_of(models[version % 3]))
    assert sorted(completions) == list(range(40))
    for completion in completions.values():
        versions = completion.generated.weight_versions
        assert completion.finish_reason is not FinishReason.ABORT
        # One update per step: every token was sampled by exactly the next version.
        assert (np.diff(versions) == 1).all()


def test_preempted_sequences_match_undisturbed_ones() -> None:
    """The cache holds little more than one long sequence, so sequences are preempted repeatedly."""
    model = tiny_model()
    asked = [replace(request, sampling=SamplingParams(100)) for request in requests(8)]
    roomy = tiny_engine(model, max_new_tokens=100)
    roomy.add(asked)
    expected = run_to_end(roomy)
    one_page = page_bytes(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    tight = tiny_engine(model, max_new_tokens=100, kv_cache_bytes=12 * one_page)
    tight.add(asked)
    completions = run_to_end(tight)
    assert roomy.num_preempted == 0
    assert tight.num_preempted > 3
    assert_same(completions, expected, rounding=3e-5)  # decoded tokens are prefilled again in one product


def test_recompute_kv_matches_a_fresh_run_on_the_prefix() -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    asked = requests(8)
    engine = tiny_engine(old, recompute_kv=True)
    engine.add(asked)
    ended = [completion for _ in range(5) for completion in engine.step()]
    so_far = {
        request.rollout_id: engine.generated(request.rollout_id)
        for request in asked
        if request.rollout_id not in {completion.rollout_id for completion in ended}
    }
    assert len(so_far) > 4
    stage_and_adopt(engine, 1, weights_of(new))
    completions = run_to_end(engine)

    fresh = tiny_engine(new, version=1)
    fresh.add(
        [
            GenerationRequest(request.rollout_id, request.prompt_token_ids, request.sampling, request.seed, generated)
            for request in asked
            if (generated := so_far.get(request.rollout_id)) is not None
        ]
    )
    assert_same(completions, run_to_end(fresh))


def test_padded_and_replayed_steps_match_plain_ones() -> None:
    """Replay steps on static buffers as a CUDA graph would; each weight set has its own recording."""
    models = [tiny_model(seed=seed) for seed in range(2)]
    captured = []

    def capture(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        captured.append(run())
        return run

    def run(engine: Engine) -> dict[int, Completion]:
        engine.add(requests(13) + requests(4, shared_prompt=True, first_id=13))
        completions: dict[int, Completion] = {}
        for version in range(1, 4):
            for _ in range(6):
                completions |= {completion.rollout_id: completion for completion in engine.step()}
            stage_and_adopt(engine, version, weights_of(models[version % 2]))
        return completions | run_to_end(engine)

    plain = engine_model(models[0].config, weights_of(models[0]), max_length=56)
    graphed = GraphedModel(engine_model(models[0].config, weights_of(models[0]), max_length=56), 4, capture)
    limits = EngineLimits(max_num_seqs=11, max_prompt_tokens=32, max_new_tokens=24)
    assert_same(run(Engine(graphed, limits)), run(Engine(plain, limits)))
    assert 2 < len(captured) < 10


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bfloat16_logprobs_are_close_to_float32(family: str) -> None:
    """bfloat16 changes log-probabilities by its rounding only; weights and updates may stay float32."""
    model = tiny_model(family)
    asked = requests(8, max_tokens=8)
    runner = engine_model(model.config, weights_of(model), max_length=56, dtype=torch.bfloat16)
    engine = Engine(runner, EngineLimits(max_num_seqs=8, max_prompt_tokens=32, max_new_tokens=24))
    assert engine.compute_dtype is torch.bfloat16
    engine.add(asked)
    engine.step()
    stage_and_adopt(engine, 1, weights_of(model))
    for rollout_id, completion in run_to_end(engine).items():
        generated = completion.generated
        expected = plain_logprobs(model, asked[rollout_id].prompt_token_ids, generated.token_ids)
        np.testing.assert_allclose(generated.logprobs, expected, atol=0.5)
        assert np.abs(generated.logprobs - expected).mean() < 0.1


def test_generated_tokens_are_readable_in_flight() -> None:
    (request,) = requests(1)
    engine = tiny_engine(tiny_model())
    engine.add([request])
    assert len(engine.generated(request.rollout_id)) == 0
    seen: list[int] = []
    while engine.num_in_flight:
        for completion in engine.step():
            seen += completion.generated.token_ids[len(seen) :].tolist()
            assert completion.generated.token_ids.tolist() == seen
        if engine.num_in_flight:
            seen += engine.generated(request.rollout_id, len(seen)).token_ids.tolist()
    with pytest.raises(KeyError):
        engine.generated(request.rollout_id)


def assert_same(actual: dict[int, Completion], expected: dict[int, Completion], rounding: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for rollout_id, completion in actual.items():
        other = expected[rollout_id]
        assert completion.generated.token_ids.tolist() == other.generated.token_ids.tolist()
        assert completion.generated.weight_versions.tolist() == other.generated.weight_versions.tolist()
        assert completion.finish_reason is other.finish_reason
        np.testing.assert_allclose(completion.generated.logprobs, other.generated.logprobs, atol=rounding)


def test_samples_of_one_prompt_cost_one_prefill() -> None:
    model = tiny_model()
    runner = engine_model(model.config, weights_of(model), max_length=56)
    num_tokens = []
    forward = runner.forward

    def counting(batch: Batch, cache: KVCache) -> torch.Tensor:
        num_tokens.append(len(batch.token_ids))
        return forward(batch, cache)

    runner.forward = counting  # type: ignore[method-assign]
    engine = Engine(runner, EngineLimits(max_num_seqs=8, max_prompt_tokens=32, max_new_tokens=24))
    asked = requests(8, shared_prompt=True)
    engine.add(asked)
    while min(len(engine.generated(request.rollout_id)) for request in asked) == 0:
        assert not engine.step()
    # The first sibling prefills the prompt. The others share its pages and sample while it decodes its second token.
    assert num_tokens == [len(asked[0].prompt_token_ids), 1]


@pytest.mark.parametrize("seed", range(4))
def test_tokens_come_from_one_version_in_any_interleaving(seed: int) -> None:
    """Steps, wishes, good and broken stages in random order, beside a thread that stages, against transformers."""
    models = {version: tiny_model(seed=version) for version in range(6)}
    rng = np.random.default_rng(seed)
    engine = tiny_engine(models[0], recompute_kv=True)
    versions: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    refused: list[int] = []

    def stage() -> None:
        while (version := versions.get()) is not None:
            weights = weights_of(models[abs(version)])
            if version < 0:
                weights["model.norm.weight"] = weights["model.norm.weight"] * torch.nan
            try:
                engine.stage(IncomingWeights(abs(version), abs(version), weights.items()))
            except NonFiniteWeightsError:
                refused.append(abs(version))

    asked = requests(8, seed=seed)
    engine.add(asked)
    with ThreadPoolExecutor(1) as thread:
        staging = thread.submit(stage)
        completions: dict[int, Completion] = {}
        for version in range(1, 6):
            versions.put(version if rng.random() < 0.7 else -version)
            if rng.random() < 0.7:
                engine.adopt(version)
            for _ in range(rng.integers(4)):
                completions |= {completion.rollout_id: completion for completion in engine.step()}
        versions.put(None)
        staging.result()
    completions |= run_to_end(engine)
    assert len(completions) == 8
    for request in asked:
        generated = completions[request.rollout_id].generated
        assert (np.diff(generated.weight_versions) >= 0).all()
        for version in set(generated.weight_versions.tolist()):
            assert version not in refused
            # With recomputed keys and values, every token is sampled as if its version had read the whole prefix.
            expected = plain_logprobs(models[version], request.prompt_token_ids, generated.token_ids)
            own = generated.weight_versions == version
            np.testing.assert_allclose(generated.logprobs[own], expected[own], atol=1e-4)
