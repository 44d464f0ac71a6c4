"""Log-probabilities and entropies of a linear layer's softmax, with a custom backward pass.

Autograd would store or allocate several matrices of all logits, and new memory pages cost about as much as the
arithmetic on them. Here the logits of a chunk are overwritten in place by their gradient.

Suffixes: M tokens, D model, V vocabulary, C tokens of one chunk, R rows of one block of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Units: logits. A chunk (64 MB of float32) has hundreds of rows even with a large vocabulary, so its matrix products
# run at full speed. A block stays in a core's cache between elementwise passes. Kept logits (512 MB) are small beside
# the activations of the same tokens; the logits of other chunks are recomputed.
_CHUNK_LOGITS = 1 << 24
BLOCK_LOGITS = 1 << 18
_KEPT_LOGITS = 1 << 27


def rows_per_chunk(vocab_size: int) -> int:
    """Number of tokens per chunk (C), at least 1."""
    return max(1, _CHUNK_LOGITS // vocab_size)


def logits_bytes(num_tokens: int, vocab_size: int, device: torch.device) -> int:
    """Largest size of all logits at a time (bytes): kept logits, a chunk that is recomputed, and the current block."""
    num_logits = num_tokens * vocab_size
    chunk = min(num_logits, _CHUNK_LOGITS)
    block = min(num_logits, BLOCK_LOGITS) if device.type == "cpu" else chunk
    recomputed = chunk if num_logits > _KEPT_LOGITS else 0
    # Of a block there are its log-probabilities, its probabilities and their product.
    return 4 * (min(num_logits, _KEPT_LOGITS) + recomputed + 3 * block)


class LinearScores(torch.autograd.Function):
    """(log softmax(hidden @ weight.T + bias)[token], entropy); the entropy has no gradient.

    `for_backward`: True if logits may be kept for a backward pass.

    Shapes: hidden [M, D], weight [V, D], bias [V] or None, token_ids int64 [M] -> [M], [M]. All float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, token_ids_M: Tensor, for_backward: bool
    ) -> tuple[Tensor, Tensor]:
        log_sums_M, logprobs_M, entropy_M = (hidden_MD.new_empty(len(hidden_MD)) for _ in range(3))
        kept: list[Tensor] = []
        reused: Tensor | None = None
        for chunk in _chunks(hidden_MD, weight_VD):
            logits_CV = _logits(hidden_MD[chunk], weight_VD, bias_V, reused)
            if for_backward and chunk.stop * len(weight_VD) <= _KEPT_LOGITS:
                kept.append(logits_CV)
            else:
                reused = logits_CV if reused is None else reused
            scores = [_scores(rows, ids) for rows, ids in _blocks(logits_CV, token_ids_M[chunk])]
            for result_M, parts in zip((log_sums_M, logprobs_M, entropy_M), zip(*scores, strict=True), strict=True):
                torch.cat(parts, out=result_M[chunk])
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, token_ids_M, log_sums_M)
        ctx.kept = kept
        ctx.mark_non_differentiable(entropy_M)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads_M: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the logits: the gradient of each token times (one-hot of the token - probabilities)."""
        hidden_MD, weight_VD, bias_V, token_ids_M, log_sums_M = ctx.saved_tensors
        grad_logprobs_M, _ = grads_M
        # The logits are overwritten, so a second backward pass must recompute them.
        kept, ctx.kept = ctx.kept, []
        grad_hidden_MD = torch.empty_like(hidden_MD)
        # A frozen head, as with LoRA, would cost a third of the arithmetic.
        grad_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        reused: Tensor | None = None
        for index, chunk in enumerate(_chunks(hidden_MD, weight_VD)):
            hidden_CD, grad_C = hidden_MD[chunk], grad_logprobs_M[chunk]
            logits_CV = kept[index] if index < len(kept) else _logits(hidden_CD, weight_VD, bias_V, reused)
            # All chunks have the same size, except the last one.
            reused = logits_CV if reused is None else reused
            _differences(logits_CV, token_ids_M[chunk], log_sums_M[chunk])
            # Multiply the tokens' gradients into the narrow matrices (D) instead of the wide one (V).
            torch.mm(logits_CV, weight_VD, out=grad_hidden_MD[chunk]).mul_(-grad_C[:, None])
            if grad_weight_VD is not None:
                grad_weight_VD.addmm_(logits_CV.t(), hidden_CD * -grad_C[:, None], beta=float(index > 0))
            if grad_bias_V is not None:
                grad_bias_V.addmv_(logits_CV.t(), -grad_C)
        return grad_hidden_MD, grad_weight_VD, grad_bias_V, None, None


def _chunks(hidden_MD: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    size = rows_per_chunk(len(weight_VD))
    for start in range(0, len(hidden_MD), size):
        yield slice(start, min(start + size, len(hidden_MD)))


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, reused: Tensor | None) -> Tensor:
    """hidden @ weight.T + bias, [C, V], written into `reused` if given."""
    if reused is None:
        return F.linear(hidden_CD, weight_VD, bias_V)
    logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=reused[: len(hidden_CD)])
    return logits_CV if bias_V is None else logits_CV.add_(bias_V)


def _blocks(logits_CV: Tensor, *others_C: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split rows into blocks that fit a core's cache; on a GPU one block, because small kernels would cost more."""
    size = max(1, BLOCK_LOGITS // logits_CV.shape[1]) if logits_CV.device.type == "cpu" else len(logits_CV)
    return zip(*(torch.split(tensor, size) for tensor in (logits_CV, *others_C)), strict=True)


def _scores(logits_RV: Tensor, token_ids_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log of the sum of exponentials, log-probability of the token, entropy; each [R]."""
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    logprobs_R = logprobs_RV.gather(1, token_ids_R[:, None]).squeeze(1)
    log_sums_R = logits_RV.gather(1, token_ids_R[:, None]).squeeze(1) - logprobs_R
    return log_sums_R, logprobs_R, -torch.linalg.vecdot(logprobs_RV.exp(), logprobs_RV)


def _differences(logits_CV: Tensor, token_ids_C: Tensor, log_sums_C: Tensor) -> None:
    """Turn logits into probabilities, minus 1 at the token, in place."""
    for logits_RV, token_ids_R, log_sums_R in _blocks(logits_CV, token_ids_C, log_sums_C):
        logits_RV.sub_(log_sums_R[:, None]).exp_()
        logits_RV.scatter_add_(1, token_ids_R[:, None], logits_RV.new_full((len(logits_RV), 1), -1.0))
