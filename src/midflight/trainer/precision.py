"""Forward and backward passes in bfloat16 for float32 parameters, in one process.

bfloat16 would lose small steps: its neighboring numbers differ by about 0.4 percent. The optimizer therefore works on
float32 masters, and a separate module with rounded copies of the masters computes the passes.

Two alternatives do not work. A cast inside the graph (functional_call) has ended when activation checkpointing
recomputes layers in the backward pass. Autocast keeps the embedding and the residual stream in float32, unlike engines.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from midflight.models.policy import PackedPolicy


class ComputedPolicy:
    """Policy with parameters rounded from `masters`; its gradients are added to the masters in float32.

    Parameters of the value head, frozen parameters and parameters that already have the dtype are shared, not copied.
    Each gradient is handed over as soon as it is computed, so at most one backward pass's gradients exist twice.
    """

    def __init__(self, masters: PackedPolicy, dtype: torch.dtype) -> None:
        self._copies: list[tuple[Tensor, nn.Parameter]] = []
        shared: dict[int, object] = {id(parameter): parameter for parameter in masters.parameters()}
        for master in masters.model.parameters():
            if master.requires_grad and master.dtype != dtype:
                copied = nn.Parameter(master.detach().to(dtype))
                copied.register_post_accumulate_grad_hook(_hand_over_to(master))  # type: ignore[no-untyped-call]
                self._copies.append((master, copied))
                shared[id(master)] = copied
        # Buffers keep their dtype: frequencies of rotary embeddings are never rounded.
        self.policy = copy.deepcopy(masters, shared) if self._copies else masters

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the policy, after they have changed."""
        for master, copied in self._copies:
            copied.copy_(master)


def _hand_over_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hand_over(copied: Tensor) -> None:
        assert copied.grad is not None
        gradient = copied.grad.to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        copied.grad = None

    return hand_over
