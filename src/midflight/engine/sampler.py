"""Inverse-CDF sampling: one uniform number a row.

On a CPU, multinomial sampling costs as much as the model at large vocabularies; a cumulative sum and a search do not.
Suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample(logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sampled token ids and their log-probability under softmax(logits / temperature); both [B].

    Temperature 0 is greedy, with the log-probability at temperature 1. A token of probability zero is never drawn.
    """
    greedy_B = temperatures_B == 0
    scale_B = torch.where(greedy_B, 1.0, temperatures_B)
    logprobs_BV = torch.log_softmax(logits_BV / scale_B[:, None], dim=-1)
    # In float64, so that the far end of a large vocabulary keeps its share of the unit interval.
    cdf_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    # u * total < total, so the search cannot run past the end; `right` skips tokens that add nothing.
    drawn_B = torch.searchsorted(cdf_BV, uniforms_B.double()[:, None] * cdf_BV[:, -1:], right=True).squeeze(1)
    drawn_B = drawn_B.clamp_(max=logits_BV.shape[1] - 1)
    token_ids_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), drawn_B)
    return token_ids_B, logprobs_BV.gather(1, token_ids_B[:, None]).squeeze(1)


def score(logits_BV: Tensor, temperatures_B: Tensor, token_ids_B: Tensor) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature), at temperature 1 for temperature 0; [B]."""
    scale_B = torch.where(temperatures_B == 0, 1.0, temperatures_B)
    logprobs_BV = torch.log_softmax(logits_BV / scale_B[:, None], dim=-1)
    return logprobs_BV.gather(1, token_ids_B[:, None]).squeeze(1)


def truncate(logits_BV: Tensor, temperatures_B: Tensor, top_ks_B: Tensor, top_ps_B: Tensor, min_ps_B: Tensor) -> Tensor:
    """Logits with -inf for every token that top-k, then top-p, then min-p leave out of softmax(logits / temperature).

    The likeliest token always stays. top_k 0, top_p 1 and min_p 0 leave a row as it is.
    """
    scale_B = torch.where(temperatures_B == 0, 1.0, temperatures_B)
    sorted_BV, order_BV = (logits_BV / scale_B[:, None]).sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    sorted_BV = sorted_BV.masked_fill((top_ks_B > 0)[:, None] & (ranks_V >= top_ks_B[:, None]), -torch.inf)
    probabilities_BV = sorted_BV.softmax(dim=-1)
    # What is likelier than this token adds up to top_p already.
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    left_out_BV = (top_ps_B < 1)[:, None] & (before_BV >= top_ps_B[:, None])
    left_out_BV |= probabilities_BV < min_ps_B[:, None] * probabilities_BV[:, :1]
    left_out_BV |= sorted_BV == -torch.inf
    left_out_BV[:, 0] = False
    return logits_BV.masked_fill(torch.zeros_like(left_out_BV).scatter_(1, order_BV, left_out_BV), -torch.inf)
