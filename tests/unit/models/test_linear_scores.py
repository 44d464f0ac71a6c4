"""Hand-written log-probabilities and gradients match autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from midflight.models import linear_scores
from midflight.models.linear_scores import LinearScores

M, D, V = 23, 6, 11


def inputs(bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(M, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    return hidden, weight, torch.randn(V, requires_grad=True) if bias else None, torch.randint(V, (M,))


# Keep all chunks, none, or only the first; the last chunk is always shorter than the others.
@pytest.mark.parametrize("kept", [1 << 20, 0, 5 * V])
@pytest.mark.parametrize("bias", [False, True])
def test_scores_and_gradients_match_autograd(kept: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_CHUNK_LOGITS": 5 * V, "BLOCK_LOGITS": 2 * V, "_KEPT_LOGITS": kept}.items():
        monkeypatch.setattr(linear_scores, name, value)
    hidden, weight, bias_V, token_ids = inputs(bias)
    differentiable = [tensor for tensor in (hidden, weight, bias_V) if tensor is not None]
    logprobs, entropy = LinearScores.apply(hidden, weight, bias_V, token_ids, True)
    all_logprobs = torch.nn.functional.linear(hidden, weight, bias_V).log_softmax(-1)
    expected = all_logprobs.gather(1, token_ids[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, -(all_logprobs.exp() * all_logprobs).sum(-1))
    assert not entropy.requires_grad
    upstream = torch.randn(M)
    expected_gradients = torch.autograd.grad(expected, differentiable, upstream)
    # The second backward pass has no kept logits.
    for _ in range(2):
        gradients = torch.autograd.grad(logprobs, differentiable, upstream, retain_graph=True)
        torch.testing.assert_close(gradients, expected_gradients)


def test_frozen_head_leaves_hidden_gradient_equal() -> None:
    hidden, weight, bias_V, token_ids = inputs(bias=True)
    (expected,) = torch.autograd.grad(LinearScores.apply(hidden, weight, bias_V, token_ids, True)[0].sum(), [hidden])
    assert bias_V is not None
    frozen = weight.detach(), bias_V.detach()
    (gradient,) = torch.autograd.grad(LinearScores.apply(hidden, *frozen, token_ids, True)[0].sum(), [hidden])
    torch.testing.assert_close(gradient, expected)
