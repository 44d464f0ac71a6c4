"""bfloat16 with float32 masters, activation checkpointing and LoRA: permitted differences and invariants."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from midflight.config import load_recipe
from midflight.launch.build import build_trainer
from midflight.launch.engines import build_engine
from midflight.models.loading import load_config, load_model, stored_dtype, weights_of
from midflight.preprocess.packing import pack
from midflight.testing.fakes import InProcessWeights
from midflight.testing.tiny_models import stage_and_adopt
from midflight.trainer.policies import ADAPTER_DIRECTORY, published_weights, trained_parameters
from midflight.trainer.single import SingleProcessTrainer
from midflight.types import Microbatch, RolloutId, Trajectory
from narrowing import instance, present
from published_models import write_published_model

from .conftest import RECIPE, RunRecipe

BFLOAT16, RECOMPUTED, LORA = "trainer.dtype=bfloat16", "trainer.activation_checkpointing=true", "trainer.lora_rank=4"
VALUES, ROUNDED = "advantage.type=value", "trainer.checkpoint_dtype=bfloat16"
LEARNING_RATE = 1e-3
# Every combination.
OPTIONS = [options for count in range(4) for options in itertools.combinations((BFLOAT16, RECOMPUTED, LORA), count)]


def trainer_with(*options: str) -> SingleProcessTrainer:
    trainer = instance(build_trainer(load_recipe(RECIPE, options), InProcessWeights()), SingleProcessTrainer)
    trainer.init(rank=0)
    return trainer


def microbatches(lengths: tuple[int, ...] = (20, 33, 8), seed: int = 0) -> list[Microbatch]:
    """Return one microbatch per sequence."""
    rng = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= 3
        zeros = np.zeros(length, np.float32)
        token_ids = rng.integers(3, 44, length).astype(np.int32)
        each = Trajectory(RolloutId(number), token_ids, mask, zeros, np.zeros(length, np.int32), zeros, 1.0, 0)
        made += pack([each], 128)
    return made


def accumulate(trainer: SingleProcessTrainer, batch: list[Microbatch]) -> None:
    for index, microbatch in enumerate(batch):
        outputs = trainer.forward(microbatch)
        loss = (outputs.logprobs * (index - 1.5)).mean()
        trainer.backward(loss if outputs.values is None else loss + (outputs.values - 1).square().mean())


def step(trainer: SingleProcessTrainer, seed: int = 0) -> None:
    accumulate(trainer, microbatches(seed=seed))
    assert not trainer.optimizer_step(LEARNING_RATE).skipped


def gradients(trainer: SingleProcessTrainer) -> dict[str, Tensor]:
    return {name: present(parameter.grad).clone() for name, parameter in trainer._trained.items()}


def published(trainer: SingleProcessTrainer) -> dict[str, Tensor]:
    trainer.publish_weights(1)
    return instance(trainer._sender, InProcessWeights).sent[1]


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.float().flatten() for tensor in tensors.values()])


@pytest.mark.parametrize(
    "options",
    [*OPTIONS, *((*each, ROUNDED) for each in ((), (BFLOAT16,), (LORA,)))],
    ids=lambda options: "+".join(options) or "plain",
)
def test_a_resumed_trainer_matches_exactly(options: tuple[str, ...], tmp_path: Path) -> None:
    straight, resumed = (trainer_with(*options, VALUES) for _ in range(2))
    step(straight)
    straight.remember_proximal()
    step(straight, seed=1)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    for trainer in (straight, resumed):
        step(trainer, seed=2)
        step(trainer, seed=3)
    assert straight._trained.keys() == resumed._trained.keys()
    for name, parameter in straight._trained.items():
        assert torch.equal(parameter, resumed._trained[name]), name
    for name, tensor in published(straight).items():
        assert torch.equal(tensor, published(resumed)[name]), name
    microbatch = microbatches()[0]
    one, other = (trainer.forward_proximal(microbatch).logprobs for trainer in (straight, resumed))
    assert torch.equal(one, other)
    assert not torch.equal(one, straight.forward(microbatch).logprobs)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_published_weights_match_checkpoint_and_engine(options: tuple[str, ...], tmp_path: Path) -> None:
    recipe, trainer = load_recipe(RECIPE, options), trainer_with(*options)
    step(trainer)
    sent = published(trainer)
    expected = torch.bfloat16 if BFLOAT16 in options else torch.float32
    assert {tensor.dtype for tensor in sent.values()} == {expected}
    assert {name: tensor.shape for name, tensor in sent.items()} == {
        name: tensor.shape for name, tensor in weights_of(load_model(recipe.model.path)).items()
    }
    trainer.save(tmp_path)
    for name, tensor in weights_of(load_model(tmp_path)).items():
        assert torch.equal(tensor.to(expected), sent[name]), name
    engine = build_engine(recipe, load_config(recipe.model.path), sent, max_num_seqs=4)
    step(trainer)
    stage_and_adopt(engine, 1, published(trainer))


# --- bfloat16 ---------------------------------------------------------------------------------------------------


def test_bfloat16_keeps_masters_gradients_and_moments_in_float32() -> None:
    trainer = trainer_with(BFLOAT16, VALUES)
    hidden: list[torch.dtype] = []
    first_layer = trainer._computed.policy.model.model.layers[0]
    first_layer.register_forward_hook(lambda layer, inputs, output: hidden.append(output.dtype))
    accumulate(trainer, microbatches())
    assert set(hidden) == {torch.bfloat16}
    assert {gradient.dtype for gradient in gradients(trainer).values()} == {torch.float32}
    assert all(parameter.grad is None for parameter in trainer._computed.policy.model.parameters())
    trainer.optimizer_step(LEARNING_RATE)
    assert {parameter.dtype for parameter in trainer._trained.values()} == {torch.float32}
    assert {state["exp_avg"].dtype for state in trainer._optimizer.state.values()} == {torch.float32}
    for name, computed in trainer._computed.policy.model.named_parameters():
        assert torch.equal(computed, trainer.model.get_parameter(name).to(torch.bfloat16)), name
    head = present(trainer._policy.value_head)
    assert present(trainer._computed.policy.value_head).weight is head.weight
    assert head.weight.dtype == torch.float32
    frequencies = trainer._computed.policy.model.model.rotary_emb.inv_freq
    assert torch.equal(frequencies, trainer.model.model.rotary_emb.inv_freq)


def test_bfloat16_gradients_match_float32_in_direction() -> None:
    plain, reduced = trainer_with(), trainer_with(BFLOAT16)
    for trainer in (plain, reduced):
        accumulate(trainer, microbatches())
    assert torch.cosine_similarity(flat(gradients(plain)), flat(gradients(reduced)), dim=0) > 0.999


def test_microbatch_gradients_are_summed_in_float32() -> None:
    """Each backward pass is rounded to bfloat16; the sum of several has more bits."""
    trainer = trainer_with(BFLOAT16)
    parts = []
    for microbatch in microbatches():
        accumulate(trainer, [microbatch])
        parts.append(gradients(trainer))
        trainer._optimizer.zero_grad()
    for microbatch in microbatches():
        accumulate(trainer, [microbatch])
    for name, gradient in gradients(trainer).items():
        assert torch.equal(gradient, parts[0][name] + parts[1][name] + parts[2][name])
    assert any(not torch.equal(each, each.bfloat16().float()) for each in gradients(trainer).values())


@pytest.mark.parametrize("other", [(), (LORA,)])
@pytest.mark.parametrize(("before", "after"), [((BFLOAT16,), ()), ((), (BFLOAT16,))])
def test_a_run_can_resume_in_another_dtype(
    before: tuple[str, ...], after: tuple[str, ...], other: tuple[str, ...], tmp_path: Path
) -> None:
    saved, resumed = trainer_with(*before, *other), trainer_with(*after, *other)
    step(saved)
    saved.remember_proximal()
    step(saved, seed=1)
    saved.save(tmp_path)
    resumed.load(tmp_path)
    assert all(torch.equal(parameter, saved._trained[name]) for name, parameter in resumed._trained.items())
    step(resumed)
    expected, found = (trainer.forward_proximal(microbatches()[0]).logprobs for trainer in (saved, resumed))
    torch.testing.assert_close(found, expected, atol=1.0, rtol=0.05)


@pytest.mark.parametrize("other", [(), (LORA,), (BFLOAT16,), (BFLOAT16, LORA)])
@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "float32")])
def test_checkpoint_has_the_dtype_of_the_model_unless_told(
    stored: str, wanted: str, other: tuple[str, ...], tmp_path: Path
) -> None:
    path = write_published_model("qwen2.5-0.5b", tmp_path / "model", getattr(torch, stored))
    expected = torch.bfloat16 if (stored, wanted) == ("bfloat16", "auto") else torch.float32
    trainer = trainer_with(f"model.path={path}", f"trainer.checkpoint_dtype={wanted}", *other)
    step(trainer)
    (tmp_path / "checkpoint").mkdir()
    trainer.save(tmp_path / "checkpoint")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype="auto")
    assert {parameter.dtype for parameter in saved.parameters()} == {expected}
    unrounded = dict(published_weights(trainer._policy, torch.float32))
    assert unrounded.keys() == dict(saved.named_parameters()).keys()
    for name, tensor in unrounded.items():
        assert torch.equal(saved.get_parameter(name), tensor.to(expected)), name
    has_masters = (tmp_path / "checkpoint" / "masters.safetensors").exists()
    assert has_masters == (expected is torch.bfloat16 and LORA not in other)
    assert stored_dtype(tmp_path / "checkpoint") is expected


# --- activation checkpointing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [(), (BFLOAT16,), (LORA,)])
def test_recomputed_layers_have_the_same_gradients(other: tuple[str, ...]) -> None:
    kept, recomputed = trainer_with(VALUES, *other), trainer_with(VALUES, RECOMPUTED, *other)
    for trainer in (kept, recomputed):
        step(trainer)  # the first gradients of LoRA's A are 0
        accumulate(trainer, microbatches())
    assert gradients(kept).keys() == gradients(recomputed).keys()
    for name, gradient in gradients(kept).items():
        assert torch.equal(gradients(recomputed)[name], gradient), name


def kept_bytes(trainer: SingleProcessTrainer) -> int:
    """Memory that the forward pass keeps for the backward pass, without parameters (bytes)."""
    storages: dict[int, int] = {}
    parameters = {each.untyped_storage().data_ptr() for each in trainer._computed.policy.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    (microbatch,) = microbatches((120,))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = trainer.forward(microbatch)
    assert outputs.logprobs.requires_grad
    return sum(storages.values())


def test_recomputed_layers_save_memory() -> None:
    kept, recomputed = kept_bytes(trainer_with()), kept_bytes(trainer_with(RECOMPUTED))
    assert recomputed < kept / 8


# --- LoRA -------------------------------------------------------------------------------------------------------


def test_only_adapters_and_the_value_head_are_trained() -> None:
    trainer = trainer_with(LORA, VALUES)
    frozen = {name: parameter.clone() for name, parameter in trainer.model.named_parameters() if ".lora_" not in name}
    assert all(".lora_" in name or name.startswith("value_head.") for name in trainer._trained)
    # 3 layers of 7 matrices, each with A and B; weight and bias of the value head.
    assert len(trainer._trained) == 3 * 7 * 2 + 2
    accumulate(trainer, microbatches())
    for name, parameter in trainer._policy.named_parameters():
        assert (parameter.grad is not None) == (name in trainer._trained), name
    for seed in range(5):
        step(trainer, seed)
        trainer.publish_weights(seed)
    for name, before in frozen.items():
        assert torch.equal(trainer.model.get_parameter(name), before), name
    assert len(trainer._optimizer.state) == len(trainer._trained)
    trainer.remember_proximal()
    assert present(trainer._proximal).keys() == trainer._trained.keys()


def test_a_new_adapter_is_deterministic_and_changes_nothing() -> None:
    plain, one, other = trainer_with(), trainer_with(LORA), trainer_with(LORA)
    for name, tensor in published(plain).items():
        assert torch.equal(tensor, published(one)[name]), name
    assert all(torch.equal(parameter, other._trained[name]) for name, parameter in one._trained.items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # raised by transformers for peft
def test_a_checkpoint_has_merged_weights_and_a_peft_adapter(tmp_path: Path) -> None:
    trainer = trainer_with(LORA)
    for seed in range(3):
        step(trainer, seed)
    trainer.save(tmp_path)
    token_ids = torch.arange(3, 30)[None]
    base = AutoModelForCausalLM.from_pretrained(load_recipe(RECIPE).model.path)
    config = json.loads((tmp_path / ADAPTER_DIRECTORY / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]).samefile(load_recipe(RECIPE).model.path)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path)(token_ids).logits
        assert (base(token_ids).logits - merged).abs().max() > 0.01
        adapted = PeftModel.from_pretrained(base, tmp_path / ADAPTER_DIRECTORY)(token_ids).logits
    torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=1e-4)


def test_a_frozen_base_exists_once_in_bfloat16() -> None:
    trainer = trainer_with(LORA, BFLOAT16)
    computed: Any = trainer._computed.policy.model
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype == torch.float32
            assert computed.get_parameter(name).dtype == torch.bfloat16
        else:
            assert parameter.dtype == torch.bfloat16
            assert computed.get_parameter(name) is parameter
    assert trained_parameters(computed).keys() == trained_parameters(trainer.model).keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "mean", "most"),
    [
        ((BFLOAT16,), 2e-2, 1.0),
        ((BFLOAT16, "engine.dtype=bfloat16"), 2e-2, 1.0),
        ((LORA,), 1e-5, 1e-4),
        ((LORA, BFLOAT16), 2e-2, 1.0),
        ((RECOMPUTED,), 1e-5, 1e-4),
    ],
)
def test_trainer_and_engine_agree_in_a_run_without_lag(
    options: tuple[str, ...], mean: float, most: float, run_recipe: RunRecipe
) -> None:
    run = run_recipe(
        *options,
        "schedule.type=conventional",
        "batch.batch_size=16",
        "batch.group_size=4",
        "trainer.max_steps=6",
        "trainer.learning_rate=1e-3",
        "sampling.max_tokens=60",
    )
    measured = [line for line in run.metrics if "mismatch/max" in line]
    assert measured
    assert all(line["mismatch/mean"] < mean and line["mismatch/max"] < most for line in measured)
