"""Two ranks are one: the same weights, metrics and checkpoints, from the processes that a run has."""

from __future__ import annotations

import functools
import multiprocessing
import shutil
from contextlib import ExitStack, closing
from ctypes import c_uint64
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from midflight.bench.rank_batches import make_batches
from midflight.bench.train_load import LoadShape
from midflight.config import Recipe, load_recipe
from midflight.launch.run_directory import RunDirectory, create_run
from midflight.launch.streams import open_batches
from midflight.launch.worker_process import WorkerContext, run_worker
from midflight.launch.workers import trainer_body, trainer_role
from midflight.metrics.jsonl import read_metrics
from midflight.trainer.saved_tensors import SavedTensors
from midflight.types import TrainingBatch

from .conftest import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS, HALF_WAY = 10, 5
LOAD = LoadShape(sequences=12, group_size=4, prompt_tokens=6, median_response=16, max_response=60)
LOSSES = {
    "reinforce": (),
    # Renewed at steps 0, 4 and 8: who goes on half-way needs what was saved of it.
    "ppo": ("loss.type=ppo", "loss.proximal_every=4", "advantage.type=value"),
}
ONE, TWO, THREE = "trainer.backend=single", "trainer.num_ranks=2", "trainer.num_ranks=3"
SETTINGS = (
    "batch.batch_size=12",
    "batch.group_size=4",
    f"trainer.max_steps={NUM_STEPS}",
    f"trainer.checkpoint_every={HALF_WAY}",
    "trainer.threads=1",
)


@dataclass
class Trained:
    run: RunDirectory
    overrides: tuple[str, ...]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.run.metrics)

    def checkpoint(self, version: int = NUM_STEPS) -> Path:
        return self.run.checkpoints / f"step_{version}"


def batches() -> list[TrainingBatch]:
    """Of two shares that have different numbers of microbatches; once, one of them has none, and once, neither has."""
    path = load_recipe(RECIPE).model.path
    made = make_batches(path, 44, LOAD, num_batches=NUM_STEPS, num_ranks=2, max_tokens=80)
    one, other = made[2].microbatches
    made[2] = replace(made[2], microbatches=[[], [*one, *other]])
    made[6] = replace(made[6], microbatches=[[], []])
    assert any(len(one) != len(other) > 0 for one, other in (batch.microbatches for batch in made))
    return made


def recipe_of(directory: Path, overrides: tuple[str, ...]) -> Recipe:
    sharded = () if ONE in overrides else ("trainer.backend=fsdp",)
    return load_recipe(RECIPE, [*SETTINGS, *sharded, *overrides, f"run.directory={directory}"])


def train(recipe: Recipe, run: RunDirectory, weights_directory: Path) -> None:
    """The trainer processes of a run, all batches being there, and none of its others."""
    weights_directory.mkdir()
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes, processes = [], []
        for rank in range(recipe.trainer.num_ranks):
            ours, theirs = spawn.Pipe()
            context = WorkerContext(recipe, run, weights_directory, theirs, RawValue(c_uint64), num_restarts=0)
            body = functools.partial(trainer_body, rank=rank)
            process = spawn.Process(target=run_worker, args=(body, trainer_role(rank), context))
            process.start()
            stack.callback(process.kill)
            pipes.append(stack.enter_context(ours))
            processes.append(process)
        for pipe in pipes:
            assert pipe.recv() == ("ready",)
        for pipe in pipes:
            pipe.send(("go",))
        for pipe, process in zip(pipes, processes, strict=True):
            assert pipe.recv() == ("done",)
            process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module", params=LOSSES)
def both(request: pytest.FixtureRequest, directory: Path) -> tuple[Trained, Trained]:
    """Trained by a single process and by two ranks."""
    found = []
    for ranks in (ONE, TWO):
        path = directory / f"{request.param}-{ranks}"
        overrides = (*LOSSES[request.param], ranks)
        recipe = recipe_of(path, overrides)
        run = create_run(recipe)
        with closing(open_batches(run, recipe)) as stream:
            for batch in batches():
                stream.append(batch)
        train(recipe, run, directory / f"weights-{path.name}")
        found.append(Trained(run, overrides))
    return found[0], found[1]


def assert_same(one: Path, other: Path) -> None:
    """All tensors of both checkpoints, but for the order of float32 sums: a gradient shows more of it than a weight."""
    stems = {path.name.split(".")[0] for path in one.glob("*.safetensors")}
    assert stems == {path.name.split(".")[0] for path in other.glob("*.safetensors")}
    assert stems >= {"model", "optimizer"}
    for stem in stems:
        with SavedTensors(one, stem) as ours, SavedTensors(other, stem) as theirs:
            assert ours.names == theirs.names
            for name in ours.names:
                expected = theirs.read(name).double()
                error = float((ours.read(name).double() - expected).norm() / expected.norm().clamp(min=1e-12))
                assert error <= (1e-4 if stem == "optimizer" else 1e-5), (stem, name, error)


def assert_close(found: Any, expected: Any, name: str) -> None:
    """Numbers, null among them, or lists of them."""
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, name)
    elif expected is None:
        assert found is None, name
    else:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_two_ranks_come_to_the_weights_of_one_process(both: tuple[Trained, Trained]) -> None:
    one, two = both
    assert_same(one.checkpoint(), two.checkpoint())
    with SavedTensors(one.checkpoint(HALF_WAY), "model") as early, SavedTensors(one.checkpoint(), "model") as late:
        assert any(not torch.equal(early.read(name), late.read(name)) for name in early.names)


def test_two_ranks_measure_what_one_process_does(both: tuple[Trained, Trained]) -> None:
    one, two = both
    assert len(one.metrics) == len(two.metrics) == NUM_STEPS
    for expected, found in zip(one.metrics, two.metrics, strict=True):
        assert list(expected) == list(found)
        for name in expected:
            if not name.startswith(("time/", "throughput/", "idle/", "memory/", "wall_s", "queue/")):
                assert_close(found[name], expected[name], name)
        assert len(found["memory/peak_bytes_by_rank"]) == 2
        assert found["memory/peak_bytes"] == max(found["memory/peak_bytes_by_rank"]) > 0


def test_transformers_reads_what_two_ranks_saved(both: tuple[Trained, Trained]) -> None:
    _, two = both
    model = AutoModelForCausalLM.from_pretrained(two.checkpoint())
    with SavedTensors(two.checkpoint(), "model") as saved:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, saved.read(name)), name


@pytest.mark.parametrize(("before", "after"), [(1, ONE), (1, THREE), (0, TWO)], ids=["2to1", "2to3", "1to2"])
def test_training_goes_on_with_another_number_of_ranks(
    both: tuple[Trained, Trained], before: int, after: str, directory: Path
) -> None:
    if "loss.type=ppo" not in both[0].overrides:
        pytest.skip("the other one saves more")
    trained = both[before]
    path = directory / f"{trained.run.path.name}-then-{after}"
    shutil.copytree(
        trained.run.path, path, ignore=shutil.ignore_patterns("*.appended", "*.room")
    )  # doorbells are pipes
    run = RunDirectory(path)
    shutil.rmtree(run.checkpoints / f"step_{NUM_STEPS}")
    train(recipe_of(path, (*trained.overrides[:-1], after)), run, directory / f"weights-{path.name}")
    assert_same(trained.checkpoint(), run.checkpoints / f"step_{NUM_STEPS}")
    assert len(read_metrics(run.metrics)) == NUM_STEPS
