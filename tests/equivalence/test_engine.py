"""The engine against plain transformers, and against itself under interruptions and other neighbors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from midflight.engine.kernels.reference import ReferenceKernels
from midflight.models.loading import weights_of
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_engine, tiny_model
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
):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB_SIZE, rng.integers(2, 30)).astype(np.int32) for _ in range(count)]
    sampling = SamplingParams(max_tokens, temperature, (STOP,))
    return [
        GenerationRequest(RolloutId(first_id + index), prompts[0 if shared_prompt else index], sampling, seed)
        for index in range(count)
    ]


def run_to_end(engine) -> dict[int, Completion]:
    completions = {}
    while engine.num_in_flight:
        completions.update({completion.rollout_id: completion for completion in engine.step()})
    return completions


def plain_logprobs(model, prompt: np.ndarray, generated: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """What transformers says about each generated token, one sequence at a time, no cache, its own attention."""
    model.set_attn_implementation("eager")
    tokens = torch.from_numpy(np.concatenate([prompt, generated])).long()
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0] / temperature
    predicted = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return predicted.gather(1, tokens[len(prompt) :, None]).squeeze(1).numpy()


ENGINES = [
    *(("llama", options, True) for options in ({}, {"tie_word_embeddings": True}, {"attention_bias": True})),
    *(("qwen2", options, True) for options in ({}, {"num_key_value_heads": 4}, {"head_dim": 16})),
    *(("qwen3", options, True) for options in ({}, {"head_dim": 16, "attention_bias": True})),
    # The model's own module, with the engine's attention plugged in.
    *((family, {}, False) for family in ("llama", "qwen3", "gpt2", "gemma2", "gemma3")),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, False),
]


@pytest.mark.parametrize("kernels", [None, ReferenceKernels()], ids=["best", "reference"])
@pytest.mark.parametrize(("family", "options", "fused"), ENGINES)
def test_logprobs_are_those_of_the_model(
    family: str, options: dict[str, object], fused: bool, kernels: ReferenceKernels | None
) -> None:
    """Through admission in turns, chunks of prefills that end inside pages, decoding and shared prefixes."""
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


def test_greedy_takes_the_most_likely_token() -> None:
    model = tiny_model()
    asked = requests(4, temperature=0.0)
    engine = tiny_engine(model)
    engine.add(asked)
    for request in asked:
        completions = run_to_end(engine) or completions  # noqa: F821 - set in the first round
        generated = completions[request.rollout_id].generated
        tokens = torch.from_numpy(np.concatenate([request.prompt_token_ids, generated.token_ids])).long()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            best = model(input_ids=tokens[None]).logits[0].argmax(-1)[len(request.prompt_token_ids) - 1 : -1]
        assert best.tolist() == generated.token_ids.tolist()


def test_neighbors_do_not_change_a_sequence() -> None:
    """The same rollout alone, in a crowd, and in few rows: the same tokens."""
    asked = requests(24)
    crowd = tiny_engine(tiny_model(), num_rows=24)
    crowd.add(asked)
    few_rows = tiny_engine(tiny_model(), num_rows=3)
    few_rows.add(list(reversed(asked)))
    in_crowd, in_few_rows = run_to_end(crowd), run_to_end(few_rows)
    for request in asked:
        alone = tiny_engine(tiny_model(), num_rows=1)
        alone.add([request])
        expected = run_to_end(alone)[request.rollout_id].generated.token_ids.tolist()
        assert in_crowd[request.rollout_id].generated.token_ids.tolist() == expected
        assert in_few_rows[request.rollout_id].generated.token_ids.tolist() == expected


def test_an_interrupted_sequence_goes_on_as_if_nothing_had_happened() -> None:
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
    second = tiny_engine(tiny_model(), num_rows=2)
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


def test_an_update_in_flight_keeps_tokens_and_keys_and_samples_on_with_the_new_weights() -> None:
    """Against transformers with an explicit cache: old keys and values for old positions, new weights from there on."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    (request,) = requests(1, max_tokens=12)
    engine = tiny_engine(old, version=7)
    engine.add([request])
    num_before = 5
    for _ in range(num_before):
        assert engine.step() == []
    engine.update_weights(8, weights_of(new))
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


def test_a_prefix_is_shared_by_siblings_but_never_across_versions() -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    asked = requests(4, shared_prompt=True)
    engine = tiny_engine(old)
    engine.add(asked[:2])
    engine.step()
    engine.update_weights(1, weights_of(new))
    engine.add(asked[2:])
    completions = run_to_end(engine)

    fresh = tiny_engine(new, version=1)
    fresh.add(asked[2:])
    for rollout_id, expected in run_to_end(fresh).items():
        assert completions[rollout_id].generated.token_ids.tolist() == expected.generated.token_ids.tolist()
        np.testing.assert_allclose(completions[rollout_id].generated.logprobs, expected.generated.logprobs, atol=1e-5)


def test_updates_under_load_lose_nothing() -> None:
    models = [tiny_model(seed=seed) for seed in range(3)]
    asked = requests(40)
    engine = tiny_engine(models[0])
    engine.add(asked)
    completions: dict[int, Completion] = {}
    version = 0
    while engine.num_in_flight:
        completions.update({completion.rollout_id: completion for completion in engine.step()})
        version += 1
        engine.update_weights(version, weights_of(models[version % 3]))
    assert sorted(completions) == list(range(40))
    for completion in completions.values():
        versions = completion.generated.weight_versions
        assert completion.finish_reason is not FinishReason.ABORT
        # One update per step: every token was sampled by exactly the next version.
        assert (np.diff(versions) == 1).all()
