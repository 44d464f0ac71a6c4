"""Two ranks of DeepSpeed compared with one process: weights, metrics, and runs that resume with the other backend."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from midflight.config.run_directory import RunDirectory
from midflight.launch.streams import open_batches
from midflight.run.directory import create_run
from midflight.trainer.deepspeed import is_installed
from midflight.types import TrainingBatch

from . import test_ranks
from .test_ranks import NUM_STEPS, ONE, SUMMED, TWO, Trained, assert_close, assert_same, recipe_of, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed(), reason="the package deepspeed is not installed"),
]

NOT_FINITE = 3
LOSSES = {
    # The proximal policy is renewed at steps 0, 4 and 8, so resuming half-way needs the saved one.
    2: ("loss.type=ppo", "loss.proximal_every=4", "advantage.type=value"),
    3: ("advantage.type=value", "trainer.activation_checkpointing=true", "trainer.checkpoint_dtype=bfloat16"),
}


def sharded(stage: int) -> tuple[str, ...]:
    return ("trainer.type=deepspeed", TWO, f"trainer.zero_stage={stage}")


def batches() -> list[TrainingBatch]:
    """Return the batches of `test_ranks`, with a loss of NaN in one microbatch of one rank."""
    made = test_ranks.batches()
    one, (first, *rest) = made[NOT_FINITE].microbatches
    broken = replace(first, rewards=np.full_like(first.rewards, np.nan))
    made[NOT_FINITE] = replace(made[NOT_FINITE], microbatches=[one, [broken, *rest]])
    return made


def trained(path: Path, overrides: tuple[str, ...]) -> Trained:
    recipe = recipe_of(path, overrides)
    run = create_run(recipe)
    with closing(open_batches(run, recipe)) as stream:
        for batch in batches():
            stream.append(batch)
    train(recipe, run, path.with_name(f"weights-{path.name}"))
    return Trained(run, overrides)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module", params=LOSSES, ids="zero_{}".format)
def both(request: pytest.FixtureRequest, directory: Path) -> tuple[Trained, Trained]:
    """Return the runs of one process and of two ranks of DeepSpeed."""
    stage, loss = request.param, LOSSES[request.param]
    one = trained(directory / f"zero-{stage}-one", (*loss, ONE))
    return one, trained(directory / f"zero-{stage}-two", (*loss, *sharded(stage)))


def test_two_ranks_reach_the_weights_of_one_process(both: tuple[Trained, Trained]) -> None:
    one, two = both
    assert_same(one.checkpoint(), two.checkpoint(), SUMMED)
    AutoModelForCausalLM.from_pretrained(two.checkpoint())


def test_two_ranks_report_the_metrics_of_one_process(both: tuple[Trained, Trained]) -> None:
    one, two = both
    assert [line["skipped"] for line in two.metrics] == [step == NOT_FINITE for step in range(NUM_STEPS)]
    for expected, found in zip(one.metrics, two.metrics, strict=True):
        assert list(expected) == list(found)
        for name in ("loss", "grad_norm", "skipped"):
            assert_close(found[name], expected[name], name, SUMMED)


@pytest.mark.parametrize("before", [1, 0], ids=["deepspeed_then_single", "single_then_deepspeed"])
def test_training_resumes_with_the_other_backend(both: tuple[Trained, Trained], before: int, directory: Path) -> None:
    trained, other = both[before], both[1 - before]
    path = directory / f"{trained.run.path.name}-then-{other.run.path.name}"
    shutil.copytree(trained.run.path, path, ignore=shutil.ignore_patterns("*.appended", "*.room"))  # wake-ups are pipes
    run = RunDirectory(path)
    shutil.rmtree(run.checkpoints / f"step_{NUM_STEPS}")
    train(recipe_of(path, other.overrides), run, directory / f"weights-{path.name}")
    assert_same(trained.checkpoint(), run.checkpoints / f"step_{NUM_STEPS}", SUMMED)


def test_a_bfloat16_step_matches_one_process(directory: Path) -> None:
    """Compare one step only: masters that differ in the last bit may round differently and diverge later."""
    once = ("trainer.dtype=bfloat16", "trainer.max_steps=1")
    one = trained(directory / "bfloat16-one", (*once, ONE))
    for stage in LOSSES:
        two = trained(directory / f"bfloat16-{stage}", (*once, *sharded(stage)))
        assert_same(one.checkpoint(1), two.checkpoint(1), SUMMED)
