"""Policy over packed sequences: one forward pass for the trainer, the reference and the proximal policy.

Suffixes: T packed tokens, M tokens that carry loss, D model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from midflight.models.attention import PackedSequences
from midflight.models.head import LogitTransform, TokenScores, score_tokens
from midflight.types import Microbatch


class PackedPolicy(torch.nn.Module):
    """Causal language model over microbatches, with an optional value head."""

    def __init__(
        self, model: Any, temperature: float, with_values: bool = False, entropy_gradient: bool = False
    ) -> None:
        """`temperature`: sampling temperature that log-probabilities refer to."""
        super().__init__()
        self.model: Any = model
        self.value_head: torch.nn.Linear | None = value_head(model.config.hidden_size) if with_values else None
        self._transform = LogitTransform.of(model.config, temperature)
        self._entropy_gradient = entropy_gradient

    def forward(self, microbatch: Microbatch) -> tuple[TokenScores, Tensor | None]:
        """Scores of the tokens that carry loss, and the values before them; each [M].

        A token is predicted from the hidden state of the previous token. This method is the only place with that shift.
        """
        device = self.model.device
        token_ids_T = _tensor(microbatch.token_ids, device)
        packed = PackedSequences.of(microbatch, device)
        hidden_TD = self.model.base_model(
            input_ids=token_ids_T[None],
            position_ids=_tensor(microbatch.position_ids, device)[None],
            use_cache=False,
            packed=packed,
        ).last_hidden_state[0]
        predicted_M = _tensor(microbatch.loss_mask, device).nonzero().squeeze(1)
        hidden_MD = hidden_TD.index_select(0, packed.previous_index[predicted_M])
        head = self.model.get_output_embeddings()
        scores = score_tokens(hidden_MD, token_ids_T[predicted_M], head, self._transform, self._entropy_gradient)
        values_M = None
        if self.value_head is not None:
            # A copy, not a view: sharded modules may lose the gradient of a view.
            values_M = self.value_head(hidden_MD.to(self.value_head.weight.dtype)).squeeze(1).clone()
        return scores, values_M


def value_head(hidden_size: int) -> torch.nn.Linear:
    """Value head with zero weights: it predicts 0 for every token."""
    head = torch.nn.Linear(hidden_size, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


def _tensor(array: Any, device: torch.device) -> Tensor:
    tensor = torch.tensor(array)
    return (tensor.long() if tensor.dtype == torch.int32 else tensor).to(device)
