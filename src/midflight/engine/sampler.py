"""Inverse-CDF sampling: one uniform number per sequence.

On a CPU with a large vocabulary, multinomial sampling costs as much as the model; a cumulative sum and a search do not.
Suffixes: B sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample(logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample token ids; return them and their log-probabilities under softmax(logits / temperature), both [B].

    Temperature 0 is greedy, with the log-probability at temperature 1. A token of probability zero is never drawn.
    """
    greedy_B = temperatures_B == 0
    scale_B = torch.where(greedy_B, 1.0, temperatures_B)
    logprobs_BV = torch.log_softmax(logits_BV / scale_B[:, None], dim=-1)
    # In float64, because float32 rounds away small probabilities at the end of a large vocabulary.
    cdf_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    # u * total < total, so the search cannot run past the end; `right` skips tokens of probability zero.
    drawn_B = torch.searchsorted(cdf_BV, uniforms_B.double()[:, None] * cdf_BV[:, -1:], right=True).squeeze(1)
    drawn_B = drawn_B.clamp_(max=logits_BV.shape[1] - 1)
    token_ids_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), drawn_B)
    return token_ids_B, logprobs_BV.gather(1, token_ids_B[:, None]).squeeze(1)


def score(logits_BV: Tensor, temperatures_B: Tensor, token_ids_B: Tensor) -> Tensor:
    """Return the log-probability of each token under softmax(logits / temperature), [B]; temperature 0 counts as 1."""
    scale_B = torch.where(temperatures_B == 0, 1.0, temperatures_B)
    logprobs_BV = torch.log_softmax(logits_BV / scale_B[:, None], dim=-1)
    return logprobs_BV.gather(1, token_ids_B[:, None]).squeeze(1)


def truncate(logits_BV: Tensor, temperatures_B: Tensor, top_ks_B: Tensor, top_ps_B: Tensor, min_ps_B: Tensor) -> Tensor:
    """Return the logits with -inf for all tokens excluded by top-k, then top-p, then min-p.

    The three truncations apply to softmax(logits / temperature). The most likely token always stays. top_k = 0,
    top_p = 1 and min_p = 0 exclude nothing.
    """
    scale_B = torch.where(temperatures_B == 0, 1.0, temperatures_B)
    sorted_BV, order_BV = (logits_BV / scale_B[:, None]).sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    sorted_BV = sorted_BV.masked_fill((top_ks_B > 0)[:, None] & (ranks_V >= top_ks_B[:, None]), -torch.inf)
    probabilities_BV = sorted_BV.softmax(dim=-1)
    # top-p excludes a token if the more likely tokens already add up to top_p.
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    excluded_BV = (top_ps_B < 1)[:, None] & (before_BV >= top_ps_B[:, None])
    excluded_BV |= probabilities_BV < min_ps_B[:, None] * probabilities_BV[:, :1]
    excluded_BV |= sorted_BV == -torch.inf
    excluded_BV[:, 0] = False
    return logits_BV.masked_fill(torch.zeros_like(excluded_BV).scatter_(1, order_BV, excluded_BV), -torch.inf)
