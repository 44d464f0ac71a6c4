"""Training in one process and in several: equal weights after the same batches, memory and step time.

consumes       the same batches from one file, one configuration after the other
waits for      its processes to end
unblocked by   their last message, or their death
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.models import DEMO_RECIPE
from benchmarks.process_memory import MemoryGrowth
from benchmarks.rank_batches import make_batches
from benchmarks.train_load import LoadShape
from midflight.config import load_recipe
from midflight.errors import BenchmarkError
from midflight.losses.objective import Objective
from midflight.losses.reinforce import reinforce
from midflight.metrics.jsonl import JsonlWriter, read_metrics
from midflight.models.loading import load_tokenizer, quiet
from midflight.report.machine import describe_machine
from midflight.streams.sqlite import SqliteStream
from midflight.tracing.spans import Tracer
from midflight.trainer.checkpoints import checkpoint_of
from midflight.trainer.fsdp import ShardedTrainer
from midflight.trainer.full_tensors import DEFAULT_BUCKET_BYTES
from midflight.trainer.loop import LoopSettings, TrainLoop
from midflight.trainer.peak_memory import peak_memory_bytes
from midflight.trainer.process_group import DistributedGroup, SingleProcessGroup, join_process_group
from midflight.trainer.saved_tensors import SavedTensors
from midflight.trainer.single import OptimizerSettings, SingleProcessTrainer
from midflight.trainer.state import TrainerState
from midflight.trainer.step import TrainStep
from midflight.types import TrainingBatch
from midflight.weights.null_sender import NullSender

# Ranks add float32 gradients in another order than one process does, and AdamW's steps do not shrink with the gradient.
MAX_DIFFERENCE = 1e-5
# Publishing may add one bucket to a rank's memory; the rest is for Python objects and what the allocator keeps.
MAX_BUCKETS = 1.1

_CPU = torch.device("cpu")
_LOAD = LoadShape(sequences=12, group_size=1, prompt_tokens=8, median_response=16, max_response=56, sigma=0.6)
_MAX_TOKENS = 256
_VOCAB_SIZE = 4096
_OPTIMIZER = OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)


@dataclass(frozen=True, slots=True)
class RanksOptions:
    """Options of the measurement. `num_ranks`: world sizes of the sharded trainer, besides the single process."""

    num_ranks: tuple[int, ...] = (2,)
    steps: int = 10
    layers: int = 15
    hidden_size: int = 768
    learning_rate: float = 1e-4


@dataclass(frozen=True, slots=True)
class _Job:
    """Settings of every process of one configuration."""

    model: Path
    directory: Path  # of this configuration
    num_ranks: int  # 0: the single process
    options: RanksOptions

    def open_batches(self) -> SqliteStream[TrainingBatch]:
        return SqliteStream(self.directory / "batches.sqlite", TrainingBatch, self.options.steps)


def bench_ranks(options: RanksOptions, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure all configurations; return a row for each.

    Raises: BenchmarkError if the final weights differ, or a process fails.
    """
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model = directory / "model"
        num_parameters = _make_model(model, options)
        report(f"made a model with {num_parameters / 1e6:.0f}M parameters")
        batches = make_batches(
            model,
            _VOCAB_SIZE,
            _LOAD,
            num_batches=options.steps,
            num_ranks=max(options.num_ranks),
            max_tokens=_MAX_TOKENS,
        )
        rows = []
        for num_ranks in (0, *options.num_ranks):
            job = _Job(model, directory / f"{num_ranks}", num_ranks, options)
            rows.append(_measure(job, batches, directory / "0"))
            report(ranks_table(rows[-1:]).splitlines()[-1])
    return {
        "machine": machine,
        "parameters": num_parameters,
        "steps": options.steps,
        "threads_per_rank": 1,
        "bucket_bytes": DEFAULT_BUCKET_BYTES,
        "rows": rows,
        "targets": ranks_targets(rows),
    }


def ranks_targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the memory that publishing adds to the rank that needs most, against one bucket."""
    targets = []
    for row in rows:
        buckets = max(row["publish_growth_bytes"]) / DEFAULT_BUCKET_BYTES
        name = f"{_name(row)}: memory of publishing (buckets of {DEFAULT_BUCKET_BYTES >> 20} MiB)"
        targets.append({"name": name, "value": buckets, "limit": MAX_BUCKETS, "holds": buckets <= MAX_BUCKETS})
    return targets


def difference(one: Path, other: Path) -> float:
    """Largest |a - b| / |b| over all tensors of two checkpoints' models."""
    with SavedTensors(one, "model") as ours, SavedTensors(other, "model") as theirs:
        assert ours.names == theirs.names
        pairs = ((ours.read(name).double(), theirs.read(name).double()) for name in ours.names)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def ranks_table(rows: Sequence[dict[str, Any]]) -> str:
    """Render one line per configuration."""
    titles = ("peak of a rank", "at its start", "to publish")
    lines = [f"{'trainer':16}{''.join(f'{title:>16}' for title in titles)}{'step':>10}{'difference':>14}"]
    for row in rows:
        keys = ("peak_memory_bytes", "start_memory_bytes", "publish_growth_bytes")
        memory = "".join(f"{max(row[key]) / 2**20:>12,.0f} MiB" for key in keys)
        lines.append(f"{_name(row):16}{memory}{row['step_s']:>8.2f} s{row['difference']:>14.1e}")
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> str:
    return f"fsdp, {row['ranks']} ranks" if row["backend"] == "fsdp" else "single"


def _measure(job: _Job, batches: Sequence[TrainingBatch], expected: Path) -> dict[str, Any]:
    job.directory.mkdir()
    with contextlib.closing(job.open_batches()) as stream:
        for batch in batches:
            stream.append(batch)
    start_memory, publish_growth = _run_ranks(job)
    lines = read_metrics(job.directory / "metrics.jsonl")
    checkpoints = (checkpoint_of(path / "checkpoints", job.options.steps) for path in (job.directory, expected))
    relative_difference = difference(*checkpoints)
    if not relative_difference <= MAX_DIFFERENCE:
        raise BenchmarkError(
            f"the weights of {job.num_ranks} ranks differ by {relative_difference:.1e} from the single process's,"
            f" more than {MAX_DIFFERENCE:.0e}"
        )
    return {
        "backend": "fsdp" if job.num_ranks else "single",
        "ranks": max(1, job.num_ranks),
        "peak_memory_bytes": lines[-1]["memory/peak_bytes_by_rank"],
        "start_memory_bytes": start_memory,
        "publish_growth_bytes": publish_growth,
        "step_s": statistics.median(line["time/step_s"] for line in lines[1:]),
        "difference": relative_difference,
        "grad_norms": [line["grad_norm"] for line in lines],
    }


def _run_ranks(job: _Job) -> tuple[list[int], list[int]]:
    """Run all processes; return the peak memory of each at its start, and what publishing adds, by rank (bytes)."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(max(1, job.num_ranks))]
    processes = [spawn.Process(target=_rank, args=(job, rank, sending)) for rank, (_, sending) in enumerate(pipes)]
    for process, (_, sending) in zip(processes, pipes, strict=True):
        process.start()
        sending.close()
    try:
        start_memory = [receiving.recv() for receiving, _ in pipes]
        publish_growth = [receiving.recv() for receiving, _ in pipes]
        for process in processes:
            process.join()
            if process.exitcode:
                raise BenchmarkError(f"a process of {job.num_ranks} ranks ended with code {process.exitcode}")
        return start_memory, publish_growth
    except EOFError:
        raise BenchmarkError(f"a process of {job.num_ranks} ranks ended too early") from None
    finally:
        for process in processes:
            process.kill()


def _rank(job: _Job, rank: int, parent: Connection) -> None:
    torch.set_num_threads(1)
    parent.send(peak_memory_bytes(_CPU))
    sender = NullSender()
    if job.num_ranks:
        with join_process_group(job.directory / "ranks", rank, job.num_ranks, _CPU) as ranks:
            parent.send(_train(job, ShardedTrainer(job.model, _OPTIMIZER, sender, ranks.mesh), ranks))
    else:
        parent.send(_train(job, SingleProcessTrainer(job.model, _OPTIMIZER, sender), SingleProcessGroup()))


def _train(job: _Job, backend: SingleProcessTrainer, ranks: DistributedGroup | SingleProcessGroup) -> int:
    """Train, then publish once more; return what publishing adds to the memory of this process (bytes)."""
    backend.init(ranks.rank)
    options = job.options
    settings = LoopSettings(
        max_steps=options.steps,
        checkpoint_every=options.steps,
        checkpoints=job.directory / "checkpoints",
        rejected_batches=job.directory / "rejected",
    )
    metrics = None if ranks.rank else JsonlWriter(job.directory / "metrics.jsonl")
    step = TrainStep(backend, Objective(reinforce), lambda step: options.learning_rate, ranks)
    loop = TrainLoop(settings, step, job.open_batches(), TrainerState(), Tracer(None, "trainer"), metrics)
    loop.run(lambda: False)
    with MemoryGrowth() as growth:
        backend.publish_weights(options.steps)
    return growth.num_bytes


def _make_model(directory: Path, options: RanksOptions) -> int:
    """Save a random model with the demo's tokenizer; return its number of parameters."""
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden_size // 64,
        num_key_value_heads=options.hidden_size // 192,
        max_position_embeddings=_LOAD.prompt_tokens + _LOAD.max_response,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with quiet():
        model.save_pretrained(directory)
    load_tokenizer(load_recipe(DEMO_RECIPE, []).model.path).save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())
