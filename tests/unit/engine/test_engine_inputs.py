"""Invalid requests, updates and limits: the error names the wrong value, and the engine keeps working."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from midflight.errors import ModelError, RequestError, WeightUpdateError
from midflight.models.loading import weights_of
from midflight.testing.tiny_models import stage_and_adopt, tiny_engine, tiny_model
from midflight.types import GeneratedTokens, GenerationRequest, RolloutId, SamplingParams

FOUR_TOKENS, NO_TOKENS = SamplingParams(4), SamplingParams(0)


def request(prompt: list[int], sampling: SamplingParams = FOUR_TOKENS, num_generated: int = 0) -> GenerationRequest:
    generated = GeneratedTokens(
        np.zeros(num_generated, np.int32), np.zeros(num_generated, np.float32), np.zeros(num_generated, np.int32)
    )
    return GenerationRequest(
        RolloutId(0), np.array(prompt, np.int32), sampling, 0, generated if num_generated else None
    )


def scored(prompt: list[int], sampling: SamplingParams = NO_TOKENS) -> GenerationRequest:
    return replace(request(prompt, sampling), score_prompt=True)


def test_prompt_and_response_share_the_total() -> None:
    engine = tiny_engine(tiny_model(), max_total_tokens=40)
    for invalid, message in (
        (request([2] * 17, SamplingParams(24)), "17 tokens, not 1 to 16"),
        (request([2] * 33, SamplingParams(1)), "33 tokens, not 1 to 32"),
        (scored([2] * 41), "41 tokens, not 1 to 40"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add([invalid])
    engine.add([request([2] * 16, SamplingParams(24))])
    while not (completions := engine.step()):
        pass
    assert len(completions[0].generated) == 24


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (request([]), "0 tokens, not 1 to 32"),
        (request([2] * 33), "33 tokens, not 1 to 32"),
        (request([2, 44]), "outside 0 to 43"),
        (request([-1]), "outside 0 to 43"),
        (request([2], SamplingParams(0)), "max_tokens is 0"),
        (scored([]), "0 tokens, not 1 to 56"),
        (scored([2] * 57), "57 tokens, not 1 to 56"),
        (scored([2] * 33, SamplingParams(1)), "33 tokens, not 1 to 32"),
        (scored([2], SamplingParams(0, top_k=3)), "scored without top_k, top_p and min_p"),
        (scored([2], SamplingParams(0, temperature=1e-9)), "temperature is 1e-09"),
        (request([2], SamplingParams(25)), "max_tokens is 25, not 1 to 24"),
        (request([2], SamplingParams(4, temperature=-0.5)), "temperature is -0.5"),
        (request([2], SamplingParams(4, temperature=float("nan"))), "temperature is nan"),
        (request([2], SamplingParams(4, top_k=-1)), "top_k is -1"),
        (request([2], SamplingParams(4, top_p=0.0)), "top_p is 0.0"),
        (request([2], SamplingParams(4, min_p=1.5)), "min_p is 1.5"),
        (request([2], SamplingParams(4, stop_token_ids=(44,))), r"stop token ids \[44\] are outside 0 to 43"),
        (request([2, 3]), "request 0 is in the list twice"),
        (request([2], SamplingParams(4, stop_token_ids=tuple(range(9)))), "9 stop tokens"),
        (request([2], num_generated=4), "already has 4 of 4"),
    ],
)
def test_invalid_request_refuses_the_whole_list(invalid: GenerationRequest, message: str) -> None:
    engine = tiny_engine(tiny_model())
    with pytest.raises(RequestError, match=message):
        engine.add([request([2, 3]), invalid])
    assert engine.num_in_flight == 0


def test_invalid_update_keeps_the_old_weights() -> None:
    old, new = tiny_model(seed=0), weights_of(tiny_model(seed=1))
    name = "model.layers.1.mlp.down_proj.weight"
    broken = [
        {key: value for key, value in new.items() if key != name},
        {**new, "model.extra": new[name]},
        {**new, name: new[name][:-1]},
        {**new, name: new[name].double()},
    ]
    undisturbed, engine = tiny_engine(old), tiny_engine(old)
    for generator in (undisturbed, engine):
        generator.add([request([2, 3, 4], SamplingParams(24))])
    for weights in broken:
        with pytest.raises(WeightUpdateError, match=r"down_proj|model\.extra"):
            stage_and_adopt(engine, 1, weights)
        engine.step()
        undisturbed.step()
    (kept,), (expected,) = engine.abort([RolloutId(0)]), undisturbed.abort([RolloutId(0)])
    assert kept.generated.weight_versions.tolist() == [0] * 4
    assert kept.generated.logprobs.tolist() == expected.generated.logprobs.tolist()


def test_model_without_attention_in_every_layer_is_refused() -> None:
    model = tiny_model("gpt2")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="gpt2 with linear_attention"):
        tiny_engine(model)


def test_heads_that_contradict_the_config_are_refused() -> None:
    model = tiny_model("gpt2")
    model.config.num_key_value_heads = 2
    engine = tiny_engine(model)
    engine.add([request([2, 3])])
    with pytest.raises(ModelError, match=r"layer 0 has keys \[1, 4, 2, 8\] .* room for 2 heads of 8"):
        engine.step()


def test_limits_beyond_context_or_cache_are_refused() -> None:
    with pytest.raises(ModelError, match="32 prompt and 481 new tokens are more than the model's context of 512"):
        tiny_engine(tiny_model(), max_new_tokens=481)
    with pytest.raises(ModelError, match=r"a KV cache of 8192 bytes has 2 pages of 4096 bytes; .* 56 tokens needs 5"):
        tiny_engine(tiny_model(), kv_cache_bytes=8192)


def test_sampling_follows_the_distribution() -> None:
    """Many samples reproduce the softmax, and a token of probability zero is never drawn."""
    from midflight.engine.randomness import stream_key, uniforms_at
    from midflight.engine.sampler import sample

    logits = torch.tensor([0.0, -torch.inf, 1.0, 2.0, -torch.inf])
    num_draws = 200_000
    draws = torch.from_numpy(uniforms_at(np.full(num_draws, stream_key(seed=0, rollout_id=3)), np.arange(num_draws)))
    token_ids, logprobs = sample(logits.expand(num_draws, -1), torch.full((num_draws,), 2.0), draws)
    expected = torch.softmax(logits / 2.0, -1)
    observed = torch.bincount(token_ids, minlength=5) / num_draws
    assert torch.allclose(observed, expected, atol=5e-3)
    assert observed[[1, 4]].tolist() == [0, 0]
    assert torch.allclose(logprobs, expected.log()[token_ids])
    edge, _ = sample(logits.expand(2, -1), torch.ones(2), torch.tensor([0.0, 1.0 - 2.0**-24]))
    assert edge.tolist() == [0, 3]
