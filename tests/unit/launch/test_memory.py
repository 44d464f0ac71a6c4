"""Estimated memory compared with the tensors of real forward and backward passes, trainers and engines."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe
from midflight.engine.engine import Engine, EngineLimits
from midflight.engine.loading import engine_model
from midflight.errors import ModelError
from midflight.launch.build import build_trainer, lora_settings
from midflight.launch.memory import (
    ModelSizes,
    activation_memory,
    engine_memory,
    layer_bytes,
    published_memory,
    trainer_memory,
)
from midflight.models.activation_checkpointing import checkpoint_layers
from midflight.models.loading import weights_of
from midflight.models.policy import PackedPolicy
from midflight.models.smollm2 import smollm2_directory
from midflight.preprocess.packing import pack
from midflight.protocols import TrainerBackend
from midflight.testing.tiny_models import stage_and_adopt, tiny_model
from midflight.trainer.single import SingleProcessTrainer
from midflight.types import GenerationRequest, Microbatch, RolloutId, SamplingParams, Trajectory
from midflight.weights.null_sender import NullSender

DEMO = SHIPPED_RECIPES["cpu_demo"]
CPU = torch.device("cpu")
NUM_TOKENS = 1024
SIZES = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 256}


def microbatch(vocab_size: int, num_tokens: int = NUM_TOKENS) -> Microbatch:
    """Make four sequences of `num_tokens` tokens together, without shared prompts."""
    rng = np.random.default_rng(0)
    length = num_tokens // 4
    mask, zeros = np.arange(length) >= 4, np.zeros(length, np.float32)
    return pack(
        [
            Trajectory(
                RolloutId(number),
                rng.integers(0, vocab_size, length, np.int32),
                mask,
                zeros,
                np.zeros(length, np.int32),
                mask.astype(np.float32),
                reward=0.0,
                first_version=0,
            )
            for number in range(4)
        ],
        num_tokens,
    )[0]


def sizes_of(model: Any, tmp_path: Path) -> ModelSizes:
    model.config.save_pretrained(tmp_path)
    return ModelSizes.of(tmp_path)


def peak_of(run: Callable[[], object]) -> int:
    """Peak of all tensors that `run` allocates on the CPU (bytes)."""
    gc.collect()  # frees of older tensors would count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    results = profiled.profiler
    assert results is not None
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(sizes).max())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_saves_the_estimated_bytes(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def saved(num_layers: int) -> int:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)  # so that no address is used twice
            return tensor

        model = tiny_model(family, num_hidden_layers=num_layers, **SIZES).to(dtype)
        own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
        tensors: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            PackedPolicy(model, 1.0)(microbatch(model.config.vocab_size))
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        return sum(size for address, size in storages.items() if address not in own)

    sizes = sizes_of(tiny_model(family, **SIZES), tmp_path)
    assert saved(3) - saved(2) == NUM_TOKENS * layer_bytes(sizes, dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("vocab_size", [300, 4000])
def test_activations_are_within_a_tenth_of_the_peak(
    dtype: torch.dtype, checkpointing: bool, vocab_size: int, tmp_path: Path
) -> None:
    model = tiny_model("llama", num_hidden_layers=3, vocab_size=vocab_size, **SIZES).to(dtype)
    if checkpointing:
        checkpoint_layers(model)
    policy, batch = PackedPolicy(model, 1.0), microbatch(vocab_size)

    def passes() -> None:
        policy(batch)[0].logprobs.sum().backward()

    passes()  # gradients exist from now on
    estimate = activation_memory(sizes_of(model, tmp_path), NUM_TOKENS, dtype.itemsize, checkpointing, CPU)
    assert peak_of(passes) == pytest.approx(estimate, rel=0.1)


def trainer_recipe(*overrides: str) -> Recipe:
    return load_recipe(DEMO, [f"batch.max_tokens={NUM_TOKENS}", *overrides])


@pytest.mark.parametrize(
    "overrides", [(), ("trainer.dtype=bfloat16",), ("trainer.lora_rank=8",)], ids=["float32", "bfloat16", "lora"]
)
def test_trainer_is_within_a_tenth_of_its_tensors(overrides: tuple[str, ...]) -> None:
    if "trainer.lora_rank=8" in overrides:
        pytest.importorskip("peft")
    recipe = trainer_recipe(*overrides)
    sizes = ModelSizes.of(recipe.model.path, lora_settings(recipe))
    batch = microbatch(sizes.vocab_size)

    backend = build_trainer(recipe, NullSender())
    backend.init(0)
    assert steps_peak(backend, batch) == pytest.approx(beyond_weights(sizes, recipe), rel=0.1)


def steps_peak(backend: TrainerBackend, batch: Microbatch) -> int:
    """Peak of two optimizer steps, each on two microbatches, without the weights."""

    def train() -> None:
        for _ in range(2):
            for _ in range(2):
                backend.backward(backend.forward(batch).logprobs.sum())
            backend.optimizer_step(1e-6)

    return peak_of(train)


def beyond_weights(sizes: ModelSizes, recipe: Recipe, num_tokens: int = NUM_TOKENS) -> int:
    parts = trainer_memory(sizes, recipe.trainer, num_tokens, has_proximal=False)
    return sum(parts.values()) - parts["weights"]


@pytest.mark.slow
def test_smollm2_trainer_is_within_a_tenth_of_its_tensors() -> None:
    try:
        path = smollm2_directory()
    except ModelError as error:
        pytest.skip(str(error))
    recipe = trainer_recipe(f"model.path={path}", "trainer.dtype=bfloat16", "trainer.activation_checkpointing=true")
    sizes = ModelSizes.of(path)
    backend, batch = build_trainer(recipe, NullSender()), microbatch(sizes.vocab_size, 128)

    backend.init(0)
    assert steps_peak(backend, batch) == pytest.approx(beyond_weights(sizes, recipe, 128), rel=0.1)


def test_proximal_policy_and_ranks_change_the_estimate() -> None:
    recipe = trainer_recipe()
    sizes = ModelSizes.of(recipe.model.path)
    one = trainer_memory(sizes, recipe.trainer, NUM_TOKENS, False)
    assert trainer_memory(sizes, recipe.trainer, NUM_TOKENS, True)["weights"] == one["weights"] + 4 * sizes.num_trained
    for kind in ("fsdp", "deepspeed"):
        ranks = trainer_recipe(f"trainer.type={kind}", "trainer.num_ranks=4")
        shared = trainer_memory(sizes, ranks.trainer, NUM_TOKENS, False)
        assert shared["optimizer"] == one["optimizer"] // 4
        assert shared["activations"] == one["activations"]


@pytest.mark.parametrize(
    ("overrides", "elements"),
    [(("trainer.dtype=bfloat16",), 4 + 2), ((), 4)],
    ids=["bfloat16", "float32"],
)
def test_weights_are_masters_and_copies(overrides: tuple[str, ...], elements: int) -> None:
    recipe = trainer_recipe(*overrides)
    sizes = ModelSizes.of(recipe.model.path)
    backend = build_trainer(recipe, NullSender())
    backend.init(0)
    assert isinstance(backend, SingleProcessTrainer)
    modules = {id(each): each for module in (backend.model, backend._computed.policy) for each in module.parameters()}
    parts = trainer_memory(sizes, recipe.trainer, NUM_TOKENS, has_proximal=False)
    assert sum(each.nbytes for each in modules.values()) == parts["weights"] == elements * sizes.num_parameters


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_engine_is_within_a_tenth_of_its_tensors(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, num_hidden_layers=3, **SIZES)
    sizes, weights = sizes_of(model, tmp_path), weights_of(model)
    recipe = load_recipe(DEMO, ["engine.max_prompt_tokens=32", "sampling.max_tokens=96"])

    def generate() -> None:
        runner = engine_model(model.config, weights, max_length=128)
        engine = Engine(runner, EngineLimits(max_num_seqs=16, max_prompt_tokens=32, max_new_tokens=96))
        sampling = SamplingParams(8, 1.0, (0,))
        engine.add([GenerationRequest(RolloutId(n), np.arange(1, 20, dtype=np.int32), sampling, 0) for n in range(16)])
        stage_and_adopt(engine, 1, weights)
        while engine.num_in_flight:
            engine.step()

    generate()
    parts = engine_memory(sizes, recipe.engine, "float32", 16, recipe.max_length)
    assert peak_of(generate) == pytest.approx(sum(parts.values()), rel=0.1)


def test_kv_cache_has_its_limit() -> None:
    recipe = load_recipe(DEMO, ["engine.kv_cache_mib=1"])
    sizes = ModelSizes.of(recipe.model.path)
    assert engine_memory(sizes, recipe.engine, "float32", 64, 224)["KV cache"] == 1 << 20


@pytest.mark.parametrize(
    ("name", "billions"), [("pipelinerl_7b", 7.62), ("april_grpo", 4.02), ("magistral_small", 23.57)]
)
def test_papers_models_have_their_published_sizes(name: str, billions: float) -> None:
    recipe = load_recipe(SHIPPED_RECIPES[name])
    sizes = ModelSizes.of(recipe.model.path)
    assert sizes.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert published_memory(sizes, recipe.trainer) == 2 * sizes.num_parameters
