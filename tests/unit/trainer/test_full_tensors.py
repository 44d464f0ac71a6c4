"""Full tensors from shards equal torch's full tensors, for shapes that do not divide evenly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import midflight
from midflight.trainer.full_tensors import full_tensors, local, local_rows
from midflight.trainer.process_group import DistributedGroup, join_process_group

SHAPES = [(7, 3), (1, 5), (2,), (6, 2, 2), (5,), (3, 0), (64, 9), (4, 1), (1,), (300, 7)]
BUCKETS = [1, 100, 1 << 20]  # bytes: one tensor per bucket, several, all


def tensors_of(group: DistributedGroup) -> dict[str, torch.Tensor]:
    """Sharded tensors of two dtypes, and one unsharded tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for number, shape in enumerate(SHAPES):
        full = torch.randn(shape, generator=generator)
        dtype = torch.bfloat16 if number in (3, 4) else torch.float32
        tensors[f"t{number}"] = distribute_tensor(full.to(dtype), group.mesh, [Shard(0)])
        if number == 5:
            tensors["step"] = torch.tensor(4.0)
    return tensors


def check(group: DistributedGroup) -> None:
    tensors = tensors_of(group)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            rows = local_rows(tensor)
            assert rows is not None
            assert torch.equal(local(tensor), tensor.full_tensor()[rows]), name
    for bucket_bytes in BUCKETS:
        gathered = dict(full_tensors(tensors.items(), bucket_bytes=bucket_bytes))
        expected = {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()
        }
        expected_names = list(tensors) if group.rank == 0 else ["step"]
        assert list(gathered) == expected_names
        cast = dict(full_tensors(tensors.items(), torch.bfloat16, bucket_bytes))
        assert list(cast) == expected_names
        assert all(torch.equal(tensor, expected[name].to(torch.bfloat16)) for name, tensor in cast.items())
        for name, tensor in gathered.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor, expected[name]), (name, bucket_bytes)


def check_messages(group: DistributedGroup) -> None:
    assert group.broadcast(10 + group.rank) == 10
    assert group.broadcast(-1 if group.rank == 0 else 7) == -1
    for sizes in ([0, 3, 5], [4, 0, 0], [0, 0, 0], [1, 2, 70_000]):
        messages = [bytes([rank]) * size for rank, size in enumerate(sizes)]
        assert group.gather(messages[group.rank]) == messages[: group.num_ranks]


@pytest.mark.slow
def test_ranks_gather_full_tensors_and_messages(tmp_path: Path) -> None:
    num_ranks = 3
    environment = os.environ | {"PYTHONPATH": str(Path(midflight.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / "ranks"), str(rank), str(num_ranks)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_ranks, "\n".join(errors)


def test_unsharded_tensors_pass_through() -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    assert [(name, tensor.tolist()) for name, tensor in full_tensors(tensors.items(), bucket_bytes=4)] == [
        ("a", [0.0, 1.0, 2.0]),
        ("b", [[1.0, 1.0], [1.0, 1.0]]),
    ]


if __name__ == "__main__":
    with join_process_group(
        Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), torch.device("cpu"), timeout_s=60.0
    ) as own:
        check(own)
        check_messages(own)
