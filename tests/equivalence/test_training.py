"""Gradients that do not depend on packing; packed sequences that never attend to each other."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midflight.config import Recipe, load_recipe
from midflight.launch.build import build_trainer
from midflight.launch.objectives import build_objective
from midflight.losses.cispo import cispo
from midflight.losses.dapo import dapo
from midflight.losses.decoupled_ppo import decoupled_ppo
from midflight.losses.denominators import BatchCounts
from midflight.losses.grpo import grpo
from midflight.losses.gspo import gspo
from midflight.losses.inputs import Loss
from midflight.losses.objective import Objective
from midflight.losses.ppo import ppo
from midflight.losses.reinforce import reinforce
from midflight.models.attention import PACKED_ATTENTION, PackedSequences
from midflight.models.policy import PackedPolicy
from midflight.preprocess.packing import pack
from midflight.protocols import PolicyOutputs, TrainerBackend
from midflight.testing.fakes import InProcessWeights
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_model
from midflight.trainer.inputs import loss_inputs
from midflight.trainer.single import SingleProcessTrainer
from midflight.types import Microbatch, RolloutId, Trajectory
from narrowing import instance, present

from .conftest import RECIPE


def single_trainer(recipe: Recipe) -> SingleProcessTrainer:
    return instance(build_trainer(recipe, InProcessWeights()), SingleProcessTrainer)


def trajectories(lengths: list[int]) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    made = []
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= min(3, length - 1)
        token_ids = rng.integers(3, VOCAB_SIZE, length).astype(np.int32)
        logprobs = np.where(mask, rng.uniform(-4, -0.1, length), 0).astype(np.float32)
        advantage = np.where(mask, rng.normal(), 0).astype(np.float32)
        made.append(
            Trajectory(RolloutId(number), token_ids, mask, logprobs, np.zeros(length, np.int32), advantage, 1.0, 0)
        )
    return made


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "gpt2", "gemma2", "gemma3"])
def test_packed_logits_match_separate_sequences(family: str) -> None:
    model = tiny_model(family)
    lengths = [5, 1, 17, 17, 2, 40, 9]
    packed_batch = pack(trajectories(lengths), max_tokens=200)[0]
    tokens = torch.tensor(packed_batch.token_ids).long()
    packed = PackedSequences.of(packed_batch)
    assert len(packed.buckets) > 1
    positions = torch.tensor(packed_batch.position_ids).long()[None]
    with torch.no_grad():
        model.set_attn_implementation(PACKED_ATTENTION)
        together = model(input_ids=tokens[None], position_ids=positions, packed=packed, use_cache=False).logits[0]
        model.set_attn_implementation("eager")
        start = 0
        for length in packed_batch.sequence_lengths.tolist():
            alone = model(input_ids=tokens[None, start : start + length]).logits[0]
            torch.testing.assert_close(together[start : start + length], alone, atol=1e-4, rtol=1e-4)
            start += length


def siblings() -> list[Trajectory]:
    """Return two groups with a prompt each, and a rollout whose prompt is a prefix of another prompt."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB_SIZE, length).astype(np.int32) for length in (9, 14)]
    made = []
    for number, prompt in enumerate([*[prompts[0]] * 4, *[prompts[1]] * 3, prompts[0][:5]]):
        (own,) = trajectories([int(rng.integers(1, 30)) + 3])
        made.append(
            Trajectory(
                RolloutId(number),
                np.concatenate([prompt, own.token_ids]),
                np.concatenate([np.zeros(len(prompt), np.bool_), np.ones(len(own.token_ids), np.bool_)]),
                np.concatenate([np.zeros(len(prompt), np.float32), own.behavior_logprobs]),
                np.zeros(len(prompt) + len(own.token_ids), np.int32),
                np.full(len(prompt) + len(own.token_ids), rng.normal(), np.float32),
                1.0,
                0,
            )
        )
    return made


def test_a_shared_prompt_changes_no_gradient() -> None:
    batch = siblings()
    num_tokens = sum(int(trajectory.loss_mask.sum()) for trajectory in batch)
    (shared,) = pack(batch, max_tokens=4096)
    assert len(shared.token_ids) == sum(len(each.token_ids) for each in batch) - 3 * 9 - 2 * 14
    together = gradients([shared], num_tokens)
    alone = gradients([pack([trajectory], 4096)[0] for trajectory in batch], num_tokens)
    scale = max(float(gradient.abs().max()) for gradient in alone.values())
    for name, expected in alone.items():
        assert (together[name] - expected).abs().max() <= 2e-6 * scale, name


def gradients(microbatches: list[Microbatch], num_tokens: int) -> dict[str, torch.Tensor]:
    recipe = load_recipe(RECIPE)
    trainer, objective = single_trainer(recipe), build_objective(recipe)
    trainer.init(rank=0)
    counts = BatchCounts(num_tokens, num_sequences=8, max_response_tokens=recipe.sampling.max_tokens)
    for microbatch in microbatches:
        inputs = loss_inputs(microbatch, trainer.forward(microbatch), None, counts, objective)
        trainer.backward(objective(inputs).loss)
    return {name: present(parameter.grad).clone() for name, parameter in trainer.model.named_parameters()}


def test_gradients_do_not_depend_on_split_or_order() -> None:
    batch = trajectories([12, 30, 7, 55, 21, 4, 33, 18])
    num_tokens = sum(int(trajectory.loss_mask.sum()) for trajectory in batch)
    whole = gradients(pack(batch, max_tokens=4096), num_tokens)
    one_by_one = gradients([pack([trajectory], 4096)[0] for trajectory in reversed(batch)], num_tokens)
    tight = gradients(pack(batch, max_tokens=64), num_tokens)
    scale = max(gradient.abs().max() for gradient in whole.values())
    assert scale > 0
    for name, expected in whole.items():
        for other in (one_by_one, tight):
            assert (other[name] - expected).abs().max() <= 1e-6 * scale + 1e-7, name


LOSSES: dict[str, Loss] = {
    "reinforce": reinforce,
    "cispo": functools.partial(cispo, clip_low=0.3, clip_high=0.5),
    "grpo": grpo,
    "dapo": dapo,
    "gspo": functools.partial(gspo, clip_low=0.05, clip_high=0.05),
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
}


def near_policy(batch: list[Trajectory], policy: PackedPolicy) -> list[Trajectory]:
    """Replace behavior log-probabilities by values near the policy, so that clips are active on some tokens."""
    rng, near = np.random.default_rng(2), []
    for each in batch:
        logprobs = each.behavior_logprobs.copy()
        with torch.no_grad():
            logprobs[each.loss_mask] = policy(pack([each], 4096)[0])[0].logprobs.numpy()
        logprobs[each.loss_mask] += rng.normal(scale=0.4, size=int(each.loss_mask.sum()))
        advantages = np.where(each.loss_mask, np.float32(rng.normal()), np.float32(0))
        near.append(replace(each, behavior_logprobs=logprobs, advantages=advantages, reward=float(rng.normal())))
    return near


def microbatches_of(batch: list[Trajectory]) -> dict[str, list[Microbatch]]:
    """Pack the batch into one microbatch, one per sequence, several, and several in another order."""
    order = np.random.default_rng(3).permutation(len(batch))
    return {
        "one of eight": pack(batch, 4096),
        "eight of one": [pack([each], 4096)[0] for each in batch],
        "in between": pack(batch, 64),
        "in another order": pack([batch[index] for index in order], 96),
    }


def gradient_of(
    microbatches: list[Microbatch],
    policy: PackedPolicy,
    other: PackedPolicy,
    counts: BatchCounts,
    objective: Objective,
) -> torch.Tensor:
    """Return the gradient of all parameters as one vector. `other` is the proximal policy and the reference."""
    policy.zero_grad()
    for microbatch in microbatches:
        with torch.no_grad():
            old, old_values = other(microbatch)
        logprobs: Any = np.zeros(len(microbatch.token_ids))  # float64, as the policies are
        logprobs[microbatch.loss_mask] = old.logprobs.numpy()
        scores, values = policy(microbatch)
        inputs = loss_inputs(
            replace(microbatch, ref_logprobs=logprobs),
            PolicyOutputs(scores.logprobs, scores.entropy, values),
            PolicyOutputs(old.logprobs, old.entropy, old_values),
            counts,
            objective,
        )
        objective(inputs).loss.backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.fixture(scope="module")
def two_policies() -> tuple[PackedPolicy, PackedPolicy]:
    """Return a tiny policy with a value head and entropy, and another policy close to it.

    Both are float64, including the norms of GPT-2: in float32 the order of sums makes 8e-7 of the largest gradient.
    """
    policy = PackedPolicy(tiny_model("gpt2"), 0.9, with_values=True, entropy_gradient=True).double()
    torch.nn.init.normal_(present(policy.value_head).weight, std=0.1, generator=torch.Generator().manual_seed(0))
    other = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.01)
    return policy, other


@pytest.mark.parametrize("denominator", ["tokens", "sequences", "sequence_mean", "constant"])
@pytest.mark.parametrize(
    ("loss", "learns_values"), [*((loss, False) for loss in LOSSES if loss != "ppo"), ("ppo", True), ("grpo", True)]
)
def test_losses_do_not_depend_on_split_packing_or_order(
    loss: str, learns_values: bool, denominator: str, two_policies: tuple[PackedPolicy, PackedPolicy]
) -> None:
    policy, other = two_policies
    batch = near_policy(siblings(), policy)
    counts = BatchCounts(sum(int(each.loss_mask.sum()) for each in batch), len(batch), max_response_tokens=40)
    objective = Objective(
        LOSSES[loss],
        denominator,
        max_response_tokens=40,
        max_ratio=2.0,
        token_mask=(0.4, 2.5),
        kl_coefficient=0.1,
        entropy_coefficient=0.05,
        gae_lambda=0.9 if learns_values else None,
        value_coefficient=0.5,
    )
    splits = microbatches_of(batch)
    assert [len(microbatches) for microbatches in splits.values()][:2] == [1, 8]
    assert 2 < len(splits["in between"]) < 8
    expected = gradient_of(splits.pop("one of eight"), policy, other, counts, objective)
    scale = expected.abs().max()
    assert scale > 1e-3
    for name, microbatches in splits.items():
        gradient = gradient_of(microbatches, policy, other, counts, objective)
        assert (gradient - expected).abs().max() <= 1e-12 * scale, name


@pytest.mark.parametrize(
    ("factor", "learning_rate", "skipped", "changed"),
    [
        (1.0, 2e-4, False, True),
        (torch.nan, 2e-4, True, False),
        (1.0, 0.0, False, False),
        (None, 2e-4, False, False),  # no backward pass: no parameter has a gradient
    ],
)
def test_a_step_says_if_it_changed_a_weight(
    factor: float | None, learning_rate: float, skipped: bool, changed: bool
) -> None:
    trainer = single_trainer(load_recipe(RECIPE))
    trainer.init(rank=0)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    (microbatch,) = pack(trajectories([20]), 64)
    policy_logprobs = trainer.forward(microbatch).logprobs
    if factor is not None:
        trainer.backward((policy_logprobs * factor).sum())
    outcome = trainer.optimizer_step(learning_rate)
    assert (outcome.skipped, outcome.changed) == (skipped, changed)
    equal = [torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters()]
    assert changed != all(equal)


def test_a_resumed_trainer_matches_exactly(tmp_path: Path) -> None:
    (microbatch,) = pack(trajectories([20, 33, 8]), 128)

    def step(trainer: TrainerBackend) -> None:
        policy_logprobs = trainer.forward(microbatch).logprobs
        trainer.backward(-policy_logprobs.mean())
        trainer.optimizer_step(2e-4)

    straight, resumed = (single_trainer(load_recipe(RECIPE)) for _ in range(2))
    for trainer in (straight, resumed):
        trainer.init(rank=0)
    step(straight)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    step(straight)
    step(resumed)
    for (name, expected), (_, parameter) in zip(
        straight.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), name
