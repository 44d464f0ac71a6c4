"""Log-probabilities and entropies from hidden states, without storing the logits of all tokens.

Suffixes: M tokens, D model, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from midflight.models.linear_scores import BLOCK_LOGITS, LinearScores, rows_per_chunk


class TokenScores(NamedTuple):
    """Scores of the chosen tokens; both [M], float32 unless the model is float64."""

    logprobs: Tensor  # nats
    entropy: Tensor  # of the whole distribution, nats; without gradient unless requested


class LogitTransform(NamedTuple):
    """Logits of the model at the sampling temperature: softcap(scale * (hidden @ weight.T + bias)) / temperature."""

    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    temperature: float = 1.0

    @classmethod
    def of(cls, config: Any, temperature: float) -> LogitTransform:
        """Read a Hugging Face configuration. Gemma 2 caps its logits, Cohere multiplies them, Granite divides them."""
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(scale, getattr(config, "final_logit_softcapping", None) or 0.0, temperature)

    @property
    def factor(self) -> float | None:
        """Factor of the linear logits; None if the transform is not linear."""
        return None if self.softcap else self.scale / self.temperature

    def apply(self, logits: Tensor) -> Tensor:
        """Apply the transform, in float32 or higher precision. Shapes: [C, V] -> [C, V]."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1.0 else logits / self.temperature


def score_tokens(
    hidden_MD: Tensor,
    token_ids_M: Tensor,
    head: torch.nn.Linear,
    transform: LogitTransform,
    entropy_gradient: bool = False,
) -> TokenScores:
    """log softmax(logits)[token] and the entropy of softmax(logits).

    A bfloat16 head is multiplied in float32, because bfloat16 rounds logits near 16 to steps of 0.06. If all logits
    together are too large, they are computed in chunks, and recomputed in the backward pass.

    Shapes: hidden_MD [M, D], token_ids_M int64 [M]; head: a linear layer from D to V -> two times [M].
    """
    factor = transform.factor
    is_large = len(hidden_MD) * len(head.weight) > BLOCK_LOGITS
    if is_large and factor and not entropy_gradient and head.weight.dtype in (torch.float32, torch.bfloat16):
        bias_V = None if head.bias is None else head.bias.float() * factor
        arguments = hidden_MD.float() * factor, head.weight.float(), bias_V, token_ids_M, torch.is_grad_enabled()
        return TokenScores(*LinearScores.apply(*arguments))  # type: ignore[no-untyped-call]
    chunk = rows_per_chunk(head.weight.shape[0])
    scores = []
    for start in range(0, max(len(hidden_MD), 1), chunk):
        hidden_CD, token_ids_C = hidden_MD[start : start + chunk], token_ids_M[start : start + chunk]
        arguments_C = hidden_CD, token_ids_C, head, transform, entropy_gradient
        if len(hidden_MD) <= chunk or not torch.is_grad_enabled():
            scores.append(_score_chunk(*arguments_C))
        else:
            scores.append(checkpoint(_score_chunk, *arguments_C, use_reentrant=False))
    logprobs, entropies = zip(*scores, strict=True)
    return TokenScores(torch.cat(logprobs), torch.cat(entropies))


def _score_chunk(
    hidden_CD: Tensor, token_ids_C: Tensor, head: torch.nn.Linear, transform: LogitTransform, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logprobs_CV = torch.log_softmax(transform.apply(_logits(hidden_CD, head)), dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)
    return logprobs_CV.gather(1, token_ids_C[:, None]).squeeze(1), entropy_C


def _logits(hidden_CD: Tensor, head: torch.nn.Linear) -> Tensor:
    """Logits [C, V], in float32 if the head is bfloat16."""
    if head.weight.dtype != torch.bfloat16:
        logits_CV: Tensor = head(hidden_CD)
        return logits_CV
    return F.linear(hidden_CD.float(), head.weight.float(), None if head.bias is None else head.bias.float())
