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
    cdf_BV = logprobs_BV.exp().cumsum(dim=-1)
    # u * total < total, so the search cannot run past the end; `right` skips tokens that add nothing.
    drawn_B = torch.searchsorted(cdf_BV, uniforms_B[:, None] * cdf_BV[:, -1:], right=True).squeeze(1)
    drawn_B = drawn_B.clamp_(max=logits_BV.shape[1] - 1)
    token_ids_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), drawn_B)
    return token_ids_B, logprobs_BV.gather(1, token_ids_B[:, None]).squeeze(1)
