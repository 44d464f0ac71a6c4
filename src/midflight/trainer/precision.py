"""Forward and backward passes in bfloat16 for parameters that are float32, all of them in one process.

Small steps would be lost in bfloat16, which tells numbers apart that differ by 0.4 percent. So the optimizer works on
float32 masters, and what is computed is a module of its own whose parameters are copies of them. A cast inside the
graph (functional_call) would be over when layers are computed again in the backward pass; autocast would keep the
embedding and the residual stream in float32, which engines do not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from midflight.models.policy import PackedPolicy


class ComputedPolicy:
    """`policy` computes what `masters` are rounded to, and hands its gradients over to them, added up in float32.

    The value head, and what is frozen or of the dtype already, is not copied but shared. Gradients are handed over as
    soon as each is there, so that at most one backward pass's are kept twice.
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
        # Buffers stay as they are: frequencies of rotary embeddings are never rounded.
        self.policy = copy.deepcopy(masters, shared) if self._copies else masters

    @torch.no_grad()
    def refresh(self) -> None:
        """The masters have changed."""
        for master, copied in self._copies:
            copied.copy_(master)


def _hand_over_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hand_over(copied: Tensor) -> None:
        assert copied.grad is not None
        gradient = copied.grad.to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        copied.grad = None

    return hand_over
