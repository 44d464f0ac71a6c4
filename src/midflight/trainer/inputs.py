"""Inputs of the loss and origins of tokens, built from the batch and the forward passes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from midflight.losses.denominators import BatchCounts, token_weights
from midflight.losses.inputs import LossInputs
from midflight.losses.objective import Objective
from midflight.losses.value import generalized_advantages
from midflight.metrics.segments import TokenOrigins, tenths
from midflight.protocols import PolicyOutputs
from midflight.types import Float32Array, Microbatch


def loss_inputs(
    microbatch: Microbatch,
    outputs: PolicyOutputs,
    proximal: PolicyOutputs | None,
    counts: BatchCounts,
    objective: Objective,
) -> LossInputs:
    """Build the inputs of the loss for one microbatch.

    `proximal`: outputs of the proximal policy; None if it was just renewed and equals the policy in training.

    With a value function, advantages and returns are computed from the proximal policy's values.
    """
    device, num_sequences = outputs.logprobs.device, len(microbatch.sequence_lengths)
    sequence_index = torch.from_numpy(microbatch.sequence_index()).long().to(device)
    old = proximal or outputs

    def of_loss_tokens(values: Float32Array) -> Tensor:
        return torch.from_numpy(values[microbatch.loss_mask]).to(device)

    advantages, returns, proximal_values = of_loss_tokens(microbatch.advantages), None, None
    if objective.gae_lambda is not None:
        assert old.values is not None, "the policy has no value head"
        proximal_values = old.values.detach()
        rewards = torch.tensor(microbatch.rewards, device=device)
        advantages = generalized_advantages(proximal_values, rewards, sequence_index, objective.gae_lambda)
        returns = advantages + proximal_values
    reference = microbatch.ref_logprobs
    return LossInputs(
        policy_logprobs=outputs.logprobs,
        behavior_logprobs=of_loss_tokens(microbatch.behavior_logprobs),
        advantages=advantages,
        token_weights=token_weights(objective.denominator, counts, sequence_index, num_sequences),
        sequence_index=sequence_index,
        num_sequences=num_sequences,
        entropy=outputs.entropy,
        ref_logprobs=None if reference is None else of_loss_tokens(reference),
        proximal_logprobs=old.logprobs.detach(),
        values=outputs.values,
        proximal_values=proximal_values,
        returns=returns,
    )


def token_origins(microbatch: Microbatch, version: int) -> TokenOrigins:
    """Origins of the tokens that carry loss, for training by weights of `version`.

    Versions never decrease along a sequence, so if the first generated token has this version, all tokens have it. In
    any other sequence, tokens may have attended to keys and values of older weights: the cache survives updates.
    """
    sequence_index_M = microbatch.sequence_index()
    num_tokens_S = np.bincount(sequence_index_M, minlength=len(microbatch.sequence_lengths))
    return TokenOrigins(
        lags=version - microbatch.weight_versions[microbatch.loss_mask],
        positions=tenths(num_tokens_S),
        of_one_version=(microbatch.first_versions == version)[sequence_index_M],
    )
