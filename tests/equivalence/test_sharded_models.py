"""A sharded policy is the model that an ordinary load makes, of every family; an older one can stand in for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import midflight
from midflight.bench.train_load import LoadShape, make_trajectories
from midflight.preprocess.packing import pack
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_model
from midflight.trainer.fsdp import ShardedTrainer
from midflight.trainer.policies import PolicySettings, build_policy
from midflight.trainer.ranks import RankGroup, join_ranks
from midflight.trainer.shards import gathered
from midflight.trainer.single import OptimizerSettings, SingleProcessTrainer
from midflight.weights.drain import WeightDrain

pytestmark = pytest.mark.slow

TOKENIZER = Path(__file__).parents[2] / "recipes" / "models" / "chain_sums"
SETTINGS = PolicySettings(temperature=0.8, with_values=True)
OPTIMIZER = OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
LOAD = LoadShape(sequences=4, group_size=2, prompt_tokens=5, median_response=10, max_response=20)
OTHERWISE_NAMED = "gpt2_as_published"


def write_models(directory: Path) -> None:
    for family in ("qwen2", "qwen3", "llama", "gpt2", "gemma2", "gemma3"):
        tiny_model(family).save_pretrained(directory / family)
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(directory / "llama_tied")
    # GPT-2 was published without the first part of its names.
    tiny_model("gpt2").save_pretrained(directory / OTHERWISE_NAMED)
    file = directory / OTHERWISE_NAMED / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    for model in directory.iterdir():
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, model)


def check(model: Path, group: RankGroup) -> None:
    microbatch = pack(make_trajectories(LOAD, VOCAB_SIZE, seed=0), max_tokens=200)[0]
    settings = replace(SETTINGS, activation_checkpointing=model.name.startswith("llama"))
    trainer: SingleProcessTrainer = ShardedTrainer(model, OPTIMIZER, WeightDrain(), group.mesh, settings)
    trainer.init(group.rank)
    expected = build_policy(model, SETTINGS)
    names = [name for name, _ in expected.named_parameters()]
    sharded = dict(trainer._policy.named_parameters())
    assert list(sharded) == names
    assert all(torch.equal(tensor, expected.get_parameter(name)) for name, tensor in gathered(sharded.items())), (
        "a parameter differs"
    )
    with torch.no_grad():
        scores, _ = expected(microbatch)
    trainer.remember_proximal()
    before = trainer.forward(microbatch)
    torch.testing.assert_close(before.logprobs.detach(), scores.logprobs)
    trainer.backward(-before.logprobs.mean() / group.num_ranks)
    assert trainer.optimizer_step(1e-2)["skipped"] == 0.0
    torch.testing.assert_close(trainer.forward_proximal(microbatch).logprobs, before.logprobs.detach())
    after = trainer.forward(microbatch).logprobs.detach()
    assert (after - before.logprobs.detach()).abs().max() > 1e-3
    torch.testing.assert_close(trainer.forward_proximal(microbatch).logprobs, before.logprobs.detach())
    torch.testing.assert_close(trainer.forward(microbatch).logprobs.detach(), after)


def test_every_family_is_what_an_ordinary_load_makes_of_it(tmp_path: Path) -> None:
    write_models(tmp_path / "models")
    environment = os.environ | {"PYTHONPATH": str(Path(midflight.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / "models"), str(tmp_path / "ranks"), str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=280)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_ranks(Path(sys.argv[2]), int(sys.argv[3]), 2, torch.device("cpu"), timeout_s=120.0) as own:
        for path in sorted(Path(sys.argv[1]).iterdir()):
            try:
                check(path, own)
            except BaseException:
                print(f"while {path.name} was checked:", file=sys.stderr)
                raise
