"""Sharded policies of every family compared with an ordinary load; the proximal policy can replace the current one."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import benchmarks
import pytest
import torch
from benchmarks.train_load import LoadShape, make_trajectories
from safetensors.torch import load_file, save_file

import midflight
from midflight.config import SHIPPED_RECIPES
from midflight.models.lora import LoraSettings
from midflight.preprocess.packing import pack
from midflight.testing.fakes import InProcessWeights
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_model
from midflight.trainer.fsdp import ShardedTrainer
from midflight.trainer.full_tensors import full_tensors
from midflight.trainer.policies import PolicySettings
from midflight.trainer.process_group import DistributedGroup, join_process_group
from midflight.trainer.single import OptimizerSettings, SingleProcessTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENIZER = SHIPPED_RECIPES["cpu_demo"].parent / "models" / "chain_sums"
SETTINGS = PolicySettings(temperature=0.8, with_values=True)
OPTIMIZER = OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
LOAD = LoadShape(sequences=4, group_size=2, prompt_tokens=5, median_response=10, max_response=20)
MICROBATCH = pack(make_trajectories(LOAD, VOCAB_SIZE, seed=0), max_tokens=200)[0]
LORA = LoraSettings(rank=2, alpha=8.0)
VARIANTS = {
    "float32": replace(SETTINGS, activation_checkpointing=True),
    "bfloat16": replace(SETTINGS, dtype=torch.bfloat16),
    "lora": replace(SETTINGS, lora=LORA),
    "lora_bfloat16": replace(SETTINGS, lora=LORA, dtype=torch.bfloat16),
}
RENAMED = "gpt2_as_published"


def write_models(directory: Path) -> None:
    for family in ("qwen2", "qwen3", "llama", "gpt2", "gemma2", "gemma3"):
        tiny_model(family).save_pretrained(directory / family)
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(directory / "llama_tied")
    # The published GPT-2 has tensor names without the prefix "transformer.".
    tiny_model("gpt2").save_pretrained(directory / RENAMED)
    file = directory / RENAMED / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    for model in directory.iterdir():
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, model)


def trainers(
    model: Path, group: DistributedGroup, settings: PolicySettings
) -> tuple[ShardedTrainer, SingleProcessTrainer]:
    sharded = ShardedTrainer(model, OPTIMIZER, InProcessWeights(), group.mesh, settings)
    single = SingleProcessTrainer(model, OPTIMIZER, InProcessWeights(), settings)
    sharded.init(group.rank)
    single.init(0)
    return sharded, single


def step(trainer: SingleProcessTrainer, loss_factor: float = 1.0) -> None:
    outputs = trainer.forward(MICROBATCH)
    assert outputs.values is not None
    trainer.backward((outputs.values.sub(1).square() - outputs.logprobs).mean() * loss_factor)
    assert not trainer.optimizer_step(1e-2).skipped


def check_passes(model: Path, group: DistributedGroup, settings: PolicySettings) -> None:
    trainer, single = trainers(model, group, settings)
    expected = single._policy
    sharded = dict(trainer._policy.named_parameters())
    assert list(sharded) == [name for name, _ in expected.named_parameters()]
    for name, tensor in full_tensors(sharded.items()):
        parameter = expected.get_parameter(name)
        assert tensor.dtype == parameter.dtype, name
        assert torch.equal(tensor, parameter), name
        assert sharded[name].requires_grad == parameter.requires_grad, name
    for name, buffer in expected.named_buffers():
        found = trainer._policy.get_buffer(name)
        assert found.dtype == buffer.dtype, name
        assert torch.equal(found, buffer), name
    trainer.remember_proximal()
    before = trainer.forward(MICROBATCH)
    torch.testing.assert_close(before.logprobs, single.forward(MICROBATCH).logprobs)
    step(trainer, 1 / group.num_ranks)
    torch.testing.assert_close(trainer.forward_proximal(MICROBATCH).logprobs, before.logprobs.detach())
    after = trainer.forward(MICROBATCH).logprobs.detach()
    assert (after - before.logprobs.detach()).abs().max() > 1e-3
    torch.testing.assert_close(trainer.forward_proximal(MICROBATCH).logprobs, before.logprobs.detach())
    torch.testing.assert_close(trainer.forward(MICROBATCH).logprobs.detach(), after)


def check_exchange(model: Path, group: DistributedGroup, settings: PolicySettings, directory: Path) -> None:
    """Load and save a checkpoint of one process in several, and the other way round: it stays the same."""
    (sharded, single), (_, again) = (trainers(model, group, settings) for _ in range(2))
    step(single)
    own = directory / f"single-{group.rank}"
    own.mkdir(parents=True)
    single.save(own)
    sharded.load(own)
    (directory / "sharded").mkdir(exist_ok=True)
    sharded.save(directory / "sharded")
    sharded.publish_weights(1)
    single.publish_weights(1)
    if group.rank > 0:
        return
    expected, found = (cast(InProcessWeights, trainer._sender).sent[1] for trainer in (single, sharded))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected), "published weights differ"
    files = sorted(path.relative_to(own) for path in own.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(directory / "sharded") for path in (directory / "sharded").rglob("*.*"))
    for file in files:
        assert (own / file).read_bytes() == (directory / "sharded" / file).read_bytes(), file
    again.load(directory / "sharded")
    step(single)
    step(again)
    assert all(torch.equal(single._trained[name], each) for name, each in again._trained.items())


def test_sharded_models_of_every_family_match_an_ordinary_load(tmp_path: Path) -> None:
    write_models(tmp_path / "models")
    packages = [Path(midflight.__file__).parents[1], Path(benchmarks.__file__).parents[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages)), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / "models"), str(tmp_path / "ranks"), str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=560)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_process_group(Path(sys.argv[2]), int(sys.argv[3]), 2, torch.device("cpu"), timeout_s=120.0) as own:
        for path, variant in itertools.product(sorted(Path(sys.argv[1]).iterdir()), VARIANTS):
            if variant in ("bfloat16", "lora") and path.name not in ("qwen2", "gpt2"):
                continue
            settings, scratch = VARIANTS[variant], Path(sys.argv[2]).with_name(f"{path.name}-{variant}")
            try:
                check_passes(path, own, settings)
                check_exchange(path, own, settings, scratch)
            except BaseException:
                print(f"failed for {path.name} in variant {variant}:", file=sys.stderr)
                raise
