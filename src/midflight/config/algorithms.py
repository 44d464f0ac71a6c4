"""The objective: `[reward]`, `[advantage]`, `[loss]` (one section per `type`) and `[reference]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from midflight.config.section import ByType, OwnSection, Section


class RewardConfig(Section):
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="length penalty: rewards fall by up to 1 over this many tokens before sampling.max_tokens; 0: none",
    )


class AdvantageOptions(Section):
    normalize_batch: bool = Field(
        False, description="also subtract the mean over the batch and divide by the standard deviation over the batch"
    )


class GroupAdvantageConfig(AdvantageOptions):
    """Compare the rewards of a group with each other."""

    type: Literal["group_mean", "group_mean_std", "leave_one_out", "none"] = "group_mean_std"


class ValueAdvantageConfig(Section):
    """Compare rewards with the predictions of a value head, which is trained along with the policy."""

    type: Literal["value"] = "value"
    gae_lambda: float = Field(
        1.0, ge=0, le=1, description="lambda of generalized advantage estimation (GAE); 1: reward minus value"
    )
    value_coefficient: float = Field(0.5, ge=0, description="weight of the value head's squared error in the loss")
    value_clip: float = Field(
        0.2, gt=0, description="largest distance of a value from the proximal policy's; beyond it, no gradient (PPO)"
    )


class OwnAdvantageConfig(OwnSection, AdvantageOptions):
    """Your own function: rewards of a group -> advantages."""


AdvantageConfig = Annotated[GroupAdvantageConfig | ValueAdvantageConfig | OwnAdvantageConfig, ByType(keeps=True)]


Denominator = Annotated[
    Literal["tokens", "sequences", "sequence_mean", "constant"],
    Field(
        description="divisor of the loss, summed over the batch: its number of tokens; its number of sequences; each"
        " sequence's length times the number of sequences; or sampling.max_tokens times the number of sequences"
    ),
]
_CLIP = "ratios are clipped to [1 - clip_low, 1 + clip_high]"
ClipLow = Annotated[float, Field(gt=0, le=1, description=_CLIP)]
ClipHigh = Annotated[float, Field(gt=0, description=_CLIP)]
RatioRange = tuple[float, float] | None


class LossOptions(Section):
    """Options of every loss."""

    denominator: Denominator = "tokens"
    max_ratio: float = Field(
        5.0, gt=0, description="c: upper bound of importance ratios; in clipped losses, only for negative advantages"
    )
    token_mask: RatioRange = Field(
        None, description="tokens with an importance ratio outside this range carry no loss (IcePop); default: all do"
    )
    sequence_mask: RatioRange = Field(
        None, description="the same for whole sequences, by the geometric mean of their ratios"
    )
    kl_coefficient: float | None = Field(
        None,
        ge=0,
        description="weight of the KL divergence from the reference model in the loss; 0: measure only; default: no"
        " reference model",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of KL(policy || reference), per token")
    kl_unbiased: bool = Field(
        True, description="weigh KL estimates by importance ratios, for an unbiased gradient; false: as in GRPO"
    )
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of a bonus for the policy's entropy")

    @property
    def needs_every_token(self) -> bool:
        """True if tokens without an advantage have a gradient, too."""
        return bool(self.kl_coefficient is not None or self.entropy_coefficient)

    @pydantic.model_validator(mode="after")
    def check_ranges(self) -> LossOptions:
        for name in ("token_mask", "sequence_mask"):
            allowed = getattr(self, name)
            if allowed and not allowed[0] < 1 < allowed[1]:
                raise ValueError(f"{name} = {list(allowed)} does not contain a ratio of 1; [0.125, 8.0] would work")
        return self


class ReinforceConfig(LossOptions):
    """REINFORCE with truncated importance weights (PipelineRL)."""

    type: Literal["reinforce"] = "reinforce"


class ClippedOptions(LossOptions):
    """Options of every loss with PPO's clip."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2

    @pydantic.model_validator(mode="after")
    def check_truncation(self) -> ClippedOptions:
        if self.max_ratio < 1 + self.clip_high:
            raise ValueError(
                f"max_ratio = {self.max_ratio:g} is less than 1 + clip_high = {1 + self.clip_high:g}, so ratios are"
                " truncated before they are clipped; raise max_ratio or lower clip_high"
            )
        return self


class GrpoConfig(ClippedOptions):
    """Group-relative policy optimization: PPO's clip, averaged over each sequence."""

    type: Literal["grpo"] = "grpo"
    denominator: Denominator = "sequence_mean"


class DapoConfig(ClippedOptions):
    """Clip-higher, averaged over all tokens; goes with batch.dynamic_sampling and reward.overlong_buffer."""

    type: Literal["dapo"] = "dapo"
    clip_high: ClipHigh = 0.28


class GspoConfig(ClippedOptions):
    """One importance ratio per sequence: the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    denominator: Denominator = "sequence_mean"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class CispoConfig(LossOptions):
    """REINFORCE with importance weights clipped on both sides; clipped tokens keep their gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0


class PpoConfig(ClippedOptions):
    """Proximal policy optimization with a value head: needs advantage.type = "value"."""

    type: Literal["ppo"] = "ppo"
    proximal_every: int = Field(
        1, ge=1, description="values are clipped around those of the last version that is a multiple of this number"
    )


class DecoupledPpoConfig(ClippedOptions):
    """PPO clipped around a recent policy of the trainer, instead of the policies that sampled the tokens."""

    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    proximal_every: int = Field(
        4, ge=1, description="the proximal policy is the last version that is a multiple of this number"
    )


class OwnLossConfig(OwnSection, LossOptions):
    """Your own function: LossInputs -> LossOutput."""

    proximal_every: int | None = Field(
        None, ge=1, description="also pass log-probabilities of the last version that is a multiple of this number"
    )

    @property
    def needs_every_token(self) -> bool:
        """True, because any function may use them."""
        return True


LossConfig = Annotated[
    ReinforceConfig
    | GrpoConfig
    | DapoConfig
    | GspoConfig
    | CispoConfig
    | PpoConfig
    | DecoupledPpoConfig
    | OwnLossConfig,
    ByType(),
]


class ReferenceConfig(Section):
    """The frozen model that loss.kl_coefficient refers to."""

    path: Path | None = Field(None, description="Hugging Face model directory; default: model.path")
    url: str | None = Field(
        None,
        pattern=r"^https?://",
        description="URL of a `midflight serve` that runs the reference model; default: a copy in this process",
    )
