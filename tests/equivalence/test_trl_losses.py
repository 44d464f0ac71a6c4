"""Value and gradient of the losses that TRL also has, compared with `_compute_loss` of TRL on the same numbers."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from midflight.losses.cispo import cispo
from midflight.losses.dapo import dapo
from midflight.losses.denominators import BatchCounts, token_weights
from midflight.losses.grpo import grpo
from midflight.losses.gspo import gspo
from midflight.losses.inputs import Loss, LossInputs
from midflight.losses.objective import Objective

pytestmark = pytest.mark.slow

LENGTHS, MAX_TOKENS = (1, 5, 9, 3, 7, 9), 12
NO_LIMIT = 1e30


@dataclass(frozen=True)
class Batch:
    """Completions of LENGTHS tokens, all [B, T], with arbitrary numbers as padding; advantages [B]."""

    policy: torch.Tensor
    behavior: torch.Tensor
    reference: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor

    @classmethod
    def random(cls) -> Batch:
        """Draw a batch with log ratios of all sizes, so that every clip is active somewhere."""
        generator, shape = torch.Generator().manual_seed(0), (len(LENGTHS), max(LENGTHS))
        normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
        behavior = -normal(shape).abs() - 2
        mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).double()
        advantages = torch.tensor([1.0, -0.5, 0.8, -1.2, 0.3, 0.0], dtype=torch.float64)
        policy = behavior + 0.8 * normal(shape)
        return cls(policy, behavior, behavior + 0.5 * normal(shape), normal(shape).abs(), mask, advantages)


def trl_loss(batch: Batch, policy: torch.Tensor, loss_type: str, **settings: Any) -> torch.Tensor:
    trl_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    names = ("delta", "use_bias_correction_kl")
    options = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    options |= {name: settings.pop(name) for name in names if name in settings}
    trainer = trl_trainer.GRPOTrainer.__new__(trl_trainer.GRPOTrainer)
    vars(trainer).update(
        {
            "args": SimpleNamespace(**options),
            "model": torch.nn.Identity(),
            "accelerator": SimpleNamespace(
                num_processes=1, sync_gradients=True, gather=lambda each: each, reduce=lambda each, reduction: each
            ),
            "loss_type": loss_type,
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.0,
            "max_completion_length": MAX_TOKENS,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "use_vllm": False,
            "aux_loss_enabled": False,
            "_entropy_bonus_enabled": False,
            "use_adaptive_entropy": False,
            "current_gradient_accumulation_steps": 1,
            "_metrics": {"train": defaultdict(list)},
            "_get_per_token_logps_and_entropies": lambda *_, **__: (policy, batch.entropy, None),
            **settings,
        }
    )
    ones = torch.ones_like(batch.mask).long()
    loss: torch.Tensor = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ones[:, :1],
            "prompt_mask": ones[:, :1],
            "completion_ids": ones,
            "completion_mask": batch.mask,
            "advantages": batch.advantages,
            "old_per_token_logps": batch.behavior,
            "ref_per_token_logps": batch.reference,
            "num_items_in_batch": batch.mask.sum(),
        },
    )
    return loss


def our_loss(batch: Batch, policy: torch.Tensor, policy_loss: Loss, denominator: str, **settings: Any) -> torch.Tensor:
    mask, lengths = batch.mask.bool(), torch.tensor(LENGTHS)
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    counts = BatchCounts(sum(LENGTHS), len(LENGTHS), MAX_TOKENS)
    inputs = LossInputs(
        policy_logprobs=policy[mask],
        behavior_logprobs=batch.behavior[mask],
        advantages=batch.advantages[index],
        token_weights=token_weights(denominator, counts, index, len(LENGTHS)),
        sequence_index=index,
        num_sequences=len(LENGTHS),
        entropy=batch.entropy[mask],
        ref_logprobs=batch.reference[mask],
    )
    # TRL does not truncate the KL.
    return Objective(policy_loss, denominator, MAX_TOKENS, max_ratio=NO_LIMIT, **settings)(inputs).loss


NO_DUAL_CLIP: dict[str, Any] = {"max_ratio": NO_LIMIT}
CASES: dict[str, tuple[Loss, str, dict[str, Any]]] = {
    "grpo": (functools.partial(grpo, **NO_DUAL_CLIP), "sequence_mean", {"loss_type": "grpo"}),
    "grpo with a wide range": (
        functools.partial(grpo, clip_low=0.5, clip_high=1.0, **NO_DUAL_CLIP),
        "sequence_mean",
        {"loss_type": "grpo", "epsilon_low": 0.5, "epsilon_high": 1.0},
    ),
    "grpo with a dual clip": (
        functools.partial(grpo, max_ratio=1.5), "sequence_mean", {"loss_type": "grpo", "delta": 1.5},
    ),
    "dapo": (functools.partial(dapo, **NO_DUAL_CLIP), "tokens", {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dapo with a dual clip": (
        functools.partial(dapo, max_ratio=1.5), "tokens", {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.5},
    ),
    "dr_grpo": (functools.partial(grpo, **NO_DUAL_CLIP), "constant", {"loss_type": "dr_grpo"}),
    "gspo": (
        functools.partial(gspo, clip_low=0.1, clip_high=0.15, **NO_DUAL_CLIP),
        "sequence_mean",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    ),
    "gspo with its own range": (
        functools.partial(gspo, **NO_DUAL_CLIP),
        "sequence_mean",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo with a dual clip": (
        functools.partial(gspo, clip_low=0.1, clip_high=0.15, max_ratio=1.2),
        "sequence_mean",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15,
         "delta": 1.2},
    ),
    # epsilon_high of TRL is the bound itself.
    "cispo": (functools.partial(cispo, clip_high=0.5), "tokens", {"loss_type": "cispo", "epsilon_high": 1.5}),
}  # fmt: skip
KL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without KL": ({}, {}),
    "with KL": ({"kl_coefficient": 0.3, "kl_unbiased": False}, {"beta": 0.3}),
    "with unbiased KL": ({"kl_coefficient": 0.3}, {"beta": 0.3, "use_bias_correction_kl": True}),
}


# TRL weights the unbiased KL of a token by the sequence ratio where the loss uses that ratio; we use the token ratio.
PAIRS = [(case, kl) for case in CASES for kl in KL if not (case.startswith("gspo") and kl == "with unbiased KL")]


@pytest.mark.parametrize(("case", "kl"), PAIRS)
def test_value_and_gradient_match_trl(case: str, kl: str) -> None:
    policy_loss, denominator, trl_settings = CASES[case]
    batch = Batch.random()
    ours, theirs = (batch.policy.clone().requires_grad_() for _ in range(2))
    our_value = our_loss(batch, ours, policy_loss, denominator, **KL[kl][0])
    their_value = trl_loss(batch, theirs, **trl_settings, **KL[kl][1])
    (our_gradient,) = torch.autograd.grad(our_value, ours)
    (their_gradient,) = torch.autograd.grad(their_value, theirs)
    assert their_gradient.abs().max() > 1e-3
    # Token weights are float32.
    torch.testing.assert_close(our_value, their_value, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-6, atol=1e-9)


def test_every_clip_is_active_in_the_test_batch() -> None:
    batch = Batch.random()
    ratio, advantages = (batch.policy - batch.behavior).exp(), batch.advantages[:, None].expand_as(batch.mask)
    mask = batch.mask.bool()
    for acts in (
        (ratio > 2) & (advantages > 0),
        (ratio < 0.5) & (advantages < 0),
        (ratio > 1.5) & (advantages < 0),
        (ratio > 0.8) & (ratio < 1.2) & (advantages != 0),
    ):
        assert (acts & mask).any()
