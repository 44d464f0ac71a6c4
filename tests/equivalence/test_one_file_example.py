"""One-file example compared with the package: the same batches from the same seed."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from benchmarks.loops import build_loops

from midflight.config import load_recipe
from midflight.metrics.jsonl import JsonlWriter
from midflight.trainer.state import TrainerState
from midflight.types import BatchChoice, ChosenBatch, RolloutGroup

from .conftest import RECIPE

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_in_one_file.py"
NUM_STEPS = 8
SETTINGS = {"seed": 3, "num_in_flight": 24, "batch_size": 16, "group_size": 4, "max_tokens": 60}
# Low enough to be reached within NUM_STEPS.
MAX_RATIO, MAX_GRAD_NORM = 1.05, 0.1
OVERRIDES = (
    *(f"run.seed={SETTINGS['seed']}", f"schedule.num_in_flight={SETTINGS['num_in_flight']}"),
    *(f"batch.batch_size={SETTINGS['batch_size']}", f"batch.group_size={SETTINGS['group_size']}"),
    *(f"sampling.max_tokens={SETTINGS['max_tokens']}", f"trainer.max_steps={NUM_STEPS}"),
    *(f"loss.max_ratio={MAX_RATIO}", f"trainer.max_grad_norm={MAX_GRAD_NORM}"),
    # Every prompt is prefilled in the step after its admission, and updates are swapped in at once. Otherwise a
    # sequence could be a token or two late, which is a matter of timing and not of the algorithm.
    *("engine.prefix_caching=false", "engine.max_batched_tokens=4096"),
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def has_reached(state: TrainerState, version: int) -> bool:
    return state.version >= version


def batches_of_the_package(directory: Path, train_ticks: int) -> list[list[RolloutGroup]]:
    """The groups of every optimizer step, which takes `train_ticks` iterations of the rollout loop."""
    recipe = load_recipe(RECIPE, OVERRIDES)
    batches: list[list[RolloutGroup]] = []
    with JsonlWriter(directory / "metrics.jsonl") as metrics:
        loops = build_loops(recipe, directory, metrics)
        take = loops.actor.take

        def take_and_record(choice: BatchChoice) -> ChosenBatch | None:
            chosen = take(choice)
            if chosen:
                batches.append(chosen.groups)
            return chosen

        loops.actor.take = take_and_record  # type: ignore[method-assign]
        state = loops.training.state
        end_of_step: int | None = None
        for tick in count():
            if tick == end_of_step:
                num_steps, end_of_step = state.version + 1, None
                loops.training.run(functools.partial(has_reached, state, num_steps))
                if state.version == NUM_STEPS:
                    return batches[:NUM_STEPS]
            if end_of_step is None and loops.stream.next_offset() > state.version:
                end_of_step = tick + train_ticks
            loops.rollouts.iteration(state.version)
    raise AssertionError


@pytest.mark.slow
def test_the_example_trains_on_the_same_batches(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "MAX_RATIO", MAX_RATIO)
    monkeypatch.setattr(example, "MAX_GRAD_NORM", MAX_GRAD_NORM)
    batches = list(example.run(example.Pipeline(**SETTINGS), NUM_STEPS))
    expected_batches = batches_of_the_package(tmp_path, example.TRAIN_TICKS)
    for batch, groups in zip(batches, expected_batches, strict=True):
        expected_rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert [rollout.group_id for rollout in batch] == [rollout.group_id for rollout in expected_rollouts]
        for rollout, expected in zip(batch, expected_rollouts, strict=True):
            assert rollout.rollout_id == expected.rollout_id
            assert rollout.prompt == expected.prompt_token_ids.tolist()
            assert rollout.response == expected.generated.token_ids.tolist()
            assert rollout.versions == expected.generated.weight_versions.tolist()
            np.testing.assert_allclose(rollout.logprobs, expected.generated.logprobs, atol=1e-4)
            assert rollout.reward == expected.reward
    # Both could agree without any update in flight; these lines rule that out.
    lags = {index - version for index, batch in enumerate(batches) for one in batch for version in one.versions}
    assert max(lags) > 1
    assert min(lags) >= 0
    assert any(len(set(rollout.versions)) > 1 for batch in batches for rollout in batch)
    # Groups out of order show that groups are trained in the order of their completion.
    group_ids = [rollout.group_id for batch in batches for rollout in batch]
    assert group_ids != sorted(group_ids)
    assert {rollout.reward for batch in batches for rollout in batch} == {0.0, 1.0}


def test_the_example_fits_in_200_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 200


@pytest.mark.slow
def test_the_example_runs_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "2"], capture_output=True, text=True, timeout=120, check=True
    )
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["version", "1"], ["version", "2"]]
    assert not done.stderr
