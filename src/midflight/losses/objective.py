"""The objective: a policy loss plus the terms that apply to every loss, so that no loss can ignore them.

    policy loss + kl_coefficient * KL(pi || reference) - entropy_coefficient * entropy + value_coefficient * value loss

The masks of off-policy tokens enter the weights of all terms except the value loss.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from midflight.losses.inputs import Loss, LossInputs, LossOutput, importance_ratio
from midflight.losses.kl import KL_ESTIMATORS
from midflight.losses.value import value_loss

RatioRange = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a recipe: `objective(inputs)` is the sum above. A setting of None or 0 leaves its term out."""

    policy_loss: Loss
    denominator: str = "tokens"  # see denominators.py
    max_response_tokens: int = 1
    max_ratio: float = 5.0  # c
    token_mask: RatioRange | None = None
    sequence_mask: RatioRange | None = None
    kl_coefficient: float | None = None
    kl_estimator: str = "k3"
    kl_unbiased: bool = True
    entropy_coefficient: float = 0.0
    gae_lambda: float | None = None  # None: no value function, the batch has the advantages
    value_coefficient: float = 0.0
    value_clip: float = 0.2
    proximal_every: int | None = None  # optimizer steps; None: no proximal policy

    @property
    def learns_values(self) -> bool:
        return self.gae_lambda is not None

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Total loss and metrics per token. Shapes: see LossInputs -> loss []."""
        allowed = self._allowed(inputs)
        masked = inputs if allowed is None else dataclasses.replace(
            inputs, token_weights=inputs.token_weights * allowed
        )  # fmt: skip
        output = self.policy_loss(masked)
        loss, metrics = output.loss, dict(output.token_metrics)
        if allowed is not None:
            metrics["ratio/masked_fraction"] = 1 - allowed
        if self.kl_coefficient is not None:
            kl = self.kl_reference(masked)
            metrics["kl/reference"] = kl.detach()
            if self.kl_coefficient:
                loss = loss + self.kl_coefficient * (masked.token_weights * kl).sum()
        if self.entropy_coefficient:
            assert inputs.entropy is not None
            loss = loss - self.entropy_coefficient * (masked.token_weights * inputs.entropy).sum()
        if self.learns_values:
            loss = loss + self.value_coefficient * value_loss(inputs, self.value_clip)
            metrics |= _value_metrics(inputs)
        return LossOutput(loss, metrics)

    def kl_reference(self, inputs: LossInputs) -> Tensor:
        """KL(pi || reference) per token, [M]: the estimator, by default times the weight min(c, pi/mu).

        Tokens are sampled by mu, not by pi. With the weight, the mean gradient equals the gradient of the KL. For k1
        and k3 the weight is differentiated, too, and the mean of the estimator equals the KL. For k2 the weight must be
        constant. Without the weight (GRPO), the mean gradients on-policy are zero for k1, the gradient of the KL for k2
        and the gradient of KL(reference || pi) for k3.

        Source: DeepSeek-V3.2 (2025), eq. 7.
        """
        assert inputs.ref_logprobs is not None, "a KL coefficient needs the reference's log-probabilities"
        estimate = KL_ESTIMATORS[self.kl_estimator](inputs.ref_logprobs - inputs.policy_logprobs)
        if not self.kl_unbiased:
            return estimate
        ratio = inputs.ratio.clamp(max=self.max_ratio)
        return (ratio.detach() if self.kl_estimator == "k2" else ratio) * estimate

    def _allowed(self, inputs: LossInputs) -> Tensor | None:
        """1 for tokens that every mask allows, else 0, [M]; None if there is no mask.

        A masked token has no term in the loss, but still counts in the mean ratio of its sequence.

        Source: IcePop (Ling team 2025) for tokens; geometric mean for sequences as in GSPO.
        """
        if self.token_mask is None and self.sequence_mask is None:
            return None
        log_ratio = inputs.log_ratio.detach()
        allowed = torch.ones_like(log_ratio)
        if self.token_mask:
            allowed = allowed * _within(inputs.ratio.detach(), self.token_mask)
        if self.sequence_mask:
            allowed = allowed * _within(importance_ratio(inputs.sequence_means(log_ratio)), self.sequence_mask)
        return allowed


def _within(ratio_M: Tensor, limits: RatioRange) -> Tensor:
    return ((ratio_M >= limits[0]) & (ratio_M <= limits[1])).to(ratio_M.dtype)


def _value_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    assert inputs.values is not None
    assert inputs.returns is not None
    values = inputs.values.detach()
    return {"value/mean": values, "value/squared_error": (values - inputs.returns).square()}
