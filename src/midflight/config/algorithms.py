"""What is optimized: `[reward]`, `[advantage]`, `[loss]` (one section per `type`) and `[reference]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from midflight.config.section import ByType, OwnSection, Section


class RewardConfig(Section):
    overlong_buffer: int = Field(
        0, ge=0, description="rewards fall by up to 1 over the last so many tokens before sampling.max_tokens; 0: not"
    )


class AdvantageOptions(Section):
    normalize_batch: bool = Field(
        False, description="then divide by the standard deviation over the batch, after subtracting its mean"
    )


class GroupAdvantageConfig(AdvantageOptions):
    """The rewards of a group, compared with each other."""

    type: Literal["group_mean", "group_mean_std", "leave_one_out", "none"] = "group_mean_std"


class ValueAdvantageConfig(Section):
    """Compared with what a value head on the policy expects; it is learned along with the policy."""

    type: Literal["value"] = "value"
    gae_lambda: float = Field(
        1.0, ge=0, le=1, description="of generalized advantage estimation from values; 1: reward minus value"
    )
    value_coefficient: float = Field(0.5, ge=0, description="of the value head's squared error in the loss")
    value_clip: float = Field(
        0.2, gt=0, description="values that moved further from the proximal policy's stop learning (PPO)"
    )


class OwnAdvantageConfig(OwnSection, AdvantageOptions):
    """A function of your own: rewards of a group -> advantages."""


AdvantageConfig = Annotated[GroupAdvantageConfig | ValueAdvantageConfig | OwnAdvantageConfig, ByType(keeps=True)]


Denominator = Annotated[
    Literal["tokens", "sequences", "sequence_mean", "constant"],
    Field(
        description="the loss is summed over the batch's tokens and divided by how many there are; by its sequences; by"
        " each one's own length and the sequences; or by sampling.max_tokens and the sequences"
    ),
]
_CLIP = "ratios are clipped to [1 - clip_low, 1 + clip_high]"
ClipLow = Annotated[float, Field(gt=0, le=1, description=_CLIP)]
ClipHigh = Annotated[float, Field(gt=0, description=_CLIP)]
RatioRange = tuple[float, float] | None


class LossOptions(Section):
    """What every loss understands."""

    denominator: Denominator = "tokens"
    max_ratio: float = Field(
        5.0, gt=0, description="c: importance ratios are truncated here; in clipped losses, for negative advantages"
    )
    token_mask: RatioRange = Field(
        None, description="tokens whose importance ratio is not in this range carry no loss (IcePop); default: all do"
    )
    sequence_mask: RatioRange = Field(
        None, description="the same for whole sequences, by the geometric mean of their ratios"
    )
    kl_coefficient: float | None = Field(
        None, ge=0, description="of the KL divergence from the reference model; 0: only measured; default: no reference"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="of KL(policy || reference), per token")
    kl_unbiased: bool = Field(
        True, description="weigh estimates by importance ratios, so that their gradient is the KL's; false: GRPO's"
    )
    entropy_coefficient: float = Field(0.0, ge=0, description="of a bonus for the policy's entropy")

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens without an advantage have a gradient, too."""
        return bool(self.kl_coefficient is not None or self.entropy_coefficient)

    @pydantic.model_validator(mode="after")
    def check_ranges(self) -> LossOptions:
        for name in ("token_mask", "sequence_mask"):
            allowed = getattr(self, name)
            if allowed and not allowed[0] < 1 < allowed[1]:
                raise ValueError(f"{name} = {list(allowed)} leaves out a ratio of 1; [0.125, 8.0] would work")
        return self


class ReinforceConfig(LossOptions):
    """Importance-weighted REINFORCE, the weight truncated (PipelineRL)."""

    type: Literal["reinforce"] = "reinforce"


class ClippedOptions(LossOptions):
    """What every loss with PPO's clip understands."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2

    @pydantic.model_validator(mode="after")
    def check_truncation(self) -> ClippedOptions:
        if self.max_ratio < 1 + self.clip_high:
            raise ValueError(
                f"max_ratio = {self.max_ratio:g} is less than 1 + clip_high = {1 + self.clip_high:g}: a ratio that may"
                " be as large would be truncated before"
            )
        return self


class GrpoConfig(ClippedOptions):
    """Group-relative policy optimization: PPO's clip, the mean over each sequence."""

    type: Literal["grpo"] = "grpo"
    denominator: Denominator = "sequence_mean"


class DapoConfig(ClippedOptions):
    """Clip-higher and the mean over all tokens; batch.dynamic_sampling and reward.overlong_buffer belong to it."""

    type: Literal["dapo"] = "dapo"
    clip_high: ClipHigh = 0.28


class GspoConfig(ClippedOptions):
    """One importance ratio per sequence, the geometric mean of its tokens'."""

    type: Literal["gspo"] = "gspo"
    denominator: Denominator = "sequence_mean"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class CispoConfig(LossOptions):
    """REINFORCE with an importance weight that is clipped on both sides and never stops the gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0


class PpoConfig(ClippedOptions):
    """Proximal policy optimization with a value head: needs advantage.type = "value"."""

    type: Literal["ppo"] = "ppo"
    proximal_every: int = Field(
        1, ge=1, description="values are clipped around those of the last version that is a multiple of this"
    )


class DecoupledPpoConfig(ClippedOptions):
    """PPO that stays close to a recent policy of the trainer, whichever older ones sampled the tokens."""

    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    proximal_every: int = Field(
        4, ge=1, description="the proximal policy is the last version that is a multiple of this, recomputed"
    )


class OwnLossConfig(OwnSection, LossOptions):
    """A function LossInputs -> LossOutput of your own."""

    proximal_every: int | None = Field(
        None, ge=1, description="it also gets log-probabilities of the last version that is a multiple of this"
    )

    @property
    def needs_every_token(self) -> bool:
        """True: any loss might."""
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
    """The frozen model of loss.kl_coefficient."""

    path: Path | None = Field(None, description="Hugging Face model directory; default: model.path")
    url: str | None = Field(
        None, pattern=r"^https?://", description="of a `midflight serve` that runs it; default: a copy of its own"
    )
