"""Token scores are the same with and without chunks, and match the logits of each model family."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM

from midflight.models import head, linear_scores
from midflight.models.head import LogitTransform, TokenScores, score_tokens
from midflight.testing.tiny_models import tiny_model

NUM_TOKENS, SIZE, VOCAB_SIZE = 11, 8, 40
TRANSFORMS = [
    LogitTransform(),
    LogitTransform(scale=0.25),
    LogitTransform(softcap=3.0),
    LogitTransform(temperature=0.7),
    LogitTransform(scale=2.0, softcap=5.0, temperature=1.5),
]


def linear(bias: bool = True) -> torch.nn.Linear:
    layer = torch.nn.Linear(SIZE, VOCAB_SIZE, bias=bias, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def hidden_states() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, SIZE, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator)


def gradients(scores: TokenScores, leaves: list[Tensor], with_entropy: bool) -> tuple[Tensor, ...]:
    """Gradients of a weighted sum with a different weight for each token."""
    weights = torch.linspace(-1, 2, NUM_TOKENS, dtype=torch.float64)
    loss = (weights * scores.logprobs).sum() + ((weights.square() * scores.entropy).sum() if with_entropy else 0)
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("rows", [1, 4, NUM_TOKENS - 1])
def test_chunks_change_neither_scores_nor_gradients(
    rows: int, transform: LogitTransform, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, (hidden, token_ids) = linear(), hidden_states()
    leaves = [hidden, *layer.parameters()]
    expected = score_tokens(hidden, token_ids, layer, transform, entropy_gradient)
    monkeypatch.setattr(linear_scores, "_CHUNK_LOGITS", rows * VOCAB_SIZE)
    calls: list[int] = []
    layer.register_forward_hook(lambda *arguments: calls.append(len(arguments[-1])))
    chunked = score_tokens(hidden, token_ids, layer, transform, entropy_gradient)
    assert calls == [min(rows, NUM_TOKENS - start) for start in range(0, NUM_TOKENS, rows)]
    torch.testing.assert_close(chunked, expected)
    expected_gradients = gradients(expected, leaves, entropy_gradient)
    torch.testing.assert_close(gradients(chunked, leaves, entropy_gradient), expected_gradients)
    assert len(calls) > NUM_TOKENS / rows  # recomputed in the backward pass
    with torch.no_grad():
        torch.testing.assert_close(score_tokens(hidden, token_ids, layer, transform, entropy_gradient), expected)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_scores_match_an_explicit_distribution(transform: LogitTransform) -> None:
    layer, (hidden, token_ids) = linear(), hidden_states()
    logits = transform.scale * (hidden @ layer.weight.T + layer.bias)
    if transform.softcap:
        logits = transform.softcap * (logits / transform.softcap).tanh()
    distribution = torch.distributions.Categorical(logits=logits / transform.temperature)
    expected = TokenScores(distribution.log_prob(token_ids), distribution.entropy())
    scores = score_tokens(hidden, token_ids, layer, transform, entropy_gradient=True)
    torch.testing.assert_close(scores, expected)
    leaves = [hidden, *layer.parameters()]
    torch.testing.assert_close(gradients(scores, leaves, True), gradients(expected, leaves, True))


def test_entropy_has_a_gradient_only_on_request() -> None:
    layer, (hidden, token_ids) = linear(), hidden_states()
    assert not score_tokens(hidden, token_ids, layer, LogitTransform()).entropy.requires_grad
    assert score_tokens(hidden, token_ids, layer, LogitTransform(), entropy_gradient=True).entropy.requires_grad


def test_no_tokens_give_no_scores() -> None:
    scores = score_tokens(torch.zeros(0, SIZE).double(), torch.zeros(0).long(), linear(), LogitTransform())
    assert scores.logprobs.shape == scores.entropy.shape == (0,)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_bfloat16_is_scored_in_float32(
    transform: LogitTransform, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(head, "BLOCK_LOGITS", 0)
    layer, (hidden, token_ids) = linear().to(torch.bfloat16), hidden_states()
    halved = hidden.detach().to(torch.bfloat16).requires_grad_()
    leaves = [halved, *layer.parameters()]
    scores = score_tokens(halved, token_ids, layer, transform)
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    exact = copy.deepcopy(layer).double()
    expected = score_tokens(halved.double(), token_ids, exact, transform)
    # bfloat16 logits would differ much more.
    torch.testing.assert_close(scores.logprobs.double(), expected.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy.double(), expected.entropy, atol=1e-5, rtol=1e-5)
    expected_gradients = gradients(expected, [halved, *exact.parameters()], False)
    for gradient, reference in zip(gradients(scores, leaves, False), expected_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), reference.double(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, LogitTransform()),
        ({"final_logit_softcapping": None, "logit_scale": None, "logits_scaling": None}, LogitTransform()),
        ({"final_logit_softcapping": 30.0}, LogitTransform(softcap=30.0)),
        ({"logit_scale": 0.0625}, LogitTransform(scale=0.0625)),
        ({"logits_scaling": 8.0}, LogitTransform(scale=0.125)),
    ],
)
def test_logit_transform_is_read_from_the_configuration(config: dict[str, Any], expected: LogitTransform) -> None:
    assert LogitTransform.of(SimpleNamespace(**config), temperature=1.0) == expected
    assert LogitTransform.of(SimpleNamespace(**config), temperature=0.5) == expected._replace(temperature=0.5)


SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "attn_implementation": "eager",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@pytest.mark.parametrize(
    "model_of",
    [
        lambda: tiny_model("gemma2", final_logit_softcapping=2.0, attn_implementation="eager"),
        lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.0625)),
        lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=8.0)),
    ],
    ids=["gemma2", "cohere", "granite"],
)
def test_logits_match_transformers(model_of: Any) -> None:
    torch.manual_seed(0)
    model = model_of().eval()
    token_ids = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
        expected = model(input_ids=token_ids[None]).logits[0].float()
        hidden = model.base_model(input_ids=token_ids[None]).last_hidden_state[0]
        raw = model.get_output_embeddings()(hidden)
        transform = LogitTransform.of(model.config, temperature=1.0)
        scores = score_tokens(hidden, token_ids, model.get_output_embeddings(), transform)
    assert (raw - expected).abs().max() > 0.1  # otherwise the transform would not be tested
    torch.testing.assert_close(transform.apply(raw), expected)
    torch.testing.assert_close(scores.logprobs, expected.log_softmax(-1).gather(1, token_ids[:, None])[:, 0])
