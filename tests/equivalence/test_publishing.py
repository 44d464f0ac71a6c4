"""Two ranks of FSDP2 publish weights bucket by bucket, and once more if an engine lacks them."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path

import benchmarks
import pytest
import torch
from benchmarks.process_memory import MemoryGrowth
from benchmarks.rank_batches import make_batches
from benchmarks.train_load import LoadShape
from torch import Tensor

import midflight
from midflight.config import SHIPPED_RECIPES
from midflight.losses.objective import Objective
from midflight.losses.reinforce import reinforce
from midflight.models.lora import LoraSettings
from midflight.streams.memory import MemoryStream
from midflight.testing.fakes import InProcessWeights
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_model
from midflight.tracing.spans import Tracer
from midflight.trainer.fsdp import ShardedTrainer
from midflight.trainer.full_tensors import DEFAULT_BUCKET_BYTES
from midflight.trainer.loop import LoopSettings, TrainLoop
from midflight.trainer.policies import PLAIN_POLICY, PolicySettings
from midflight.trainer.process_group import DistributedGroup, join_process_group
from midflight.trainer.single import OptimizerSettings
from midflight.trainer.state import TrainerState
from midflight.trainer.step import TrainStep
from midflight.types import TrainingBatch
from midflight.weights.null_sender import NullSender

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENIZER = SHIPPED_RECIPES["cpu_demo"].parent / "models" / "chain_sums"
OPTIMIZER = OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
LOAD = LoadShape(sequences=4, group_size=2, prompt_tokens=5, median_response=10, max_response=20)
# 38M parameters: five buckets in float32, three in bfloat16.
LARGE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16}
VARIANTS = {
    "float32": PLAIN_POLICY,
    "bfloat16": PolicySettings(dtype=torch.bfloat16),
    "lora_bfloat16": PolicySettings(dtype=torch.bfloat16, lora=LoraSettings(rank=2, alpha=8.0)),
}
NOISE_BYTES = 3 << 20  # Python objects and memory that the allocator keeps
NUM_STEPS = 3


class CountingSender(NullSender):
    """Keeps no tensor; counts the bytes that were sent, and the most that were in memory at once."""

    def __init__(self) -> None:
        self.sent_bytes = self.largest_bytes = self._alive_bytes = 0

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            self.sent_bytes += tensor.nbytes
            self._alive_bytes += tensor.nbytes
            self.largest_bytes = max(self.largest_bytes, self._alive_bytes)
            weakref.finalize(tensor, self._release, tensor.nbytes)
            del tensor  # or it would be in memory together with the next bucket

    def _release(self, num_bytes: int) -> None:
        self._alive_bytes -= num_bytes


def check_memory(model: Path, group: DistributedGroup, settings: PolicySettings) -> None:
    """Rank 0 adds one bucket to its memory; the others add at most the rows of a bucket that they cast."""
    sender = CountingSender()
    trainer = ShardedTrainer(model, OPTIMIZER, sender, group.mesh, settings)
    trainer.init(group.rank)
    trainer.publish_weights(0)  # opens connections
    with MemoryGrowth() as growth:
        trainer.publish_weights(1)
    if group.rank == 0:
        assert sender.sent_bytes > 4 * DEFAULT_BUCKET_BYTES
        assert sender.largest_bytes <= DEFAULT_BUCKET_BYTES
        # The largest merged matrix in both dtypes, and the allocator's gaps between matrices of less than 1 MB.
        merged = 10 << 20 if settings.lora else 0
        assert growth.num_bytes <= DEFAULT_BUCKET_BYTES + merged + NOISE_BYTES, growth.num_bytes
        assert growth.num_bytes > DEFAULT_BUCKET_BYTES // 2, growth.num_bytes  # or nothing was measured
    else:
        cast = DEFAULT_BUCKET_BYTES // group.num_ranks if settings.dtype is torch.bfloat16 else 0
        assert growth.num_bytes <= cast + NOISE_BYTES, growth.num_bytes


class AskingSender(InProcessWeights):
    """Wants the weights of version 1 twice and those of version 2 three times; only then is there another batch."""

    def __init__(self, stream: MemoryStream[TrainingBatch], last_batch: TrainingBatch) -> None:
        super().__init__()
        self.versions: list[int] = []
        self._stream, self._last_batch = stream, last_batch

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        earlier = self.sent.get(version, {})
        super().send(version, weights)
        assert all(torch.equal(self.sent[version][name], tensor) for name, tensor in earlier.items())
        self.versions.append(version)
        if self.versions.count(2) == 3 and version == 2:
            self._stream.append(self._last_batch)

    def wants_weights(self) -> bool:
        return self.versions[-1] in (1, 2) and self.versions.count(self.versions[-1]) <= self.versions[-1]


def check_publishing_again(model: Path, group: DistributedGroup, scratch: Path) -> None:
    batches = make_batches(model, VOCAB_SIZE, LOAD, num_batches=NUM_STEPS, num_ranks=group.num_ranks, max_tokens=200)
    stream: MemoryStream[TrainingBatch] = MemoryStream(capacity=NUM_STEPS)
    for batch in batches[: NUM_STEPS if group.rank else -1]:
        stream.append(batch)
    asking = AskingSender(stream, batches[-1])
    trainer = ShardedTrainer(model, OPTIMIZER, NullSender() if group.rank else asking, group.mesh)
    trainer.init(group.rank)
    trainer.publish_weights(0)
    step = TrainStep(trainer, Objective(reinforce), lambda step: 1e-2, group)
    settings = LoopSettings(NUM_STEPS, scratch / "checkpoints", scratch / "rejected", checkpoint_every=NUM_STEPS)
    sender = None if group.rank else asking
    TrainLoop(settings, step, stream, TrainerState(), Tracer(None, "trainer"), None, sender).run(lambda: False)
    if group.rank == 0:
        assert asking.versions == [0, 1, 1, 2, 2, 2, 3]
        head = [weights["lm_head.weight"] for weights in asking.sent.values()]
        assert not any(torch.equal(one, other) for one, other in itertools.pairwise(head))


def test_ranks_publish_one_bucket_at_a_time_and_again_if_asked(tmp_path: Path) -> None:
    for name, options in {"large": LARGE, "small": {}}.items():
        tiny_model("llama", **options).save_pretrained(tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, tmp_path / name)
    packages = [Path(midflight.__file__).parents[1], Path(benchmarks.__file__).parents[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages)), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path), str(rank)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=280)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    with join_process_group(directory / "ranks", int(sys.argv[2]), 2, torch.device("cpu"), timeout_s=120.0) as own:
        for name, variant in VARIANTS.items():
            try:
                check_memory(directory / "large", own, variant)
            except BaseException:
                print(f"failed in variant {name}:", file=sys.stderr)
                raise
        check_publishing_again(directory / "small", own, directory)
