"""Evaluation during training: its cost in tokens, and its figures beside `midflight eval` and beside closed forms.

Runs of the demo's model in one thread, on a virtual clock. The engine is wrapped in a counter, which knows nothing of
training and evaluation.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.loops import Loops, run_steps
from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe
from midflight.config.run_directory import RunDirectory
from midflight.engine.delegating import DelegatingGenerator
from midflight.evals.figures import majority_correctness, pass_at_k
from midflight.metrics.evaluations import read_evaluations
from midflight.protocols import Generator
from midflight.run.evaluation import evaluate_model
from midflight.trainer.checkpoints import checkpoint_of
from midflight.types import Completion, GenerationRequest, RolloutId

Row = dict[str, Any]

_NUM_STEPS = 18
_EVERY = 8
_SETS = (
    "eval.sets=["
    '{name = "sums", samples = 4, num_problems = 24, temperature = 0.7, top_p = 0.95,'
    " task = {options = {max_terms = 6}}},"
    '{name = "turns", samples = 2, num_problems = 16, task = {type = "running_sums"}}]'
)
_COMMON = (
    *(
        "run.seed=3",
        "batch.batch_size=16",
        "batch.group_size=4",
        "sampling.max_tokens=60",
        "trainer.learning_rate=1e-3",
    ),
    *(f"trainer.max_steps={_NUM_STEPS + 1}", "trainer.keep_checkpoints=1000", "eval.num_problems=32", _SETS),
)
_SCHEDULES = {
    "conventional": ("schedule.type=conventional", "schedule.num_in_flight=16"),
    "pipeline, max_lag": ("schedule.num_in_flight=24", "schedule.max_lag=4"),
}


class CountingGenerator(DelegatingGenerator):
    """A Generator that counts the tokens that the generator behind it samples."""

    def __init__(self, generator: Generator) -> None:
        super().__init__(generator)
        self._had: dict[RolloutId, int] = {}  # tokens of each request when it was added
        self._num_ended = 0

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far, including those of requests in flight."""
        in_flight = sum(len(self._generator.generated(rollout)) - had for rollout, had in self._had.items())
        return self._num_ended + in_flight

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._generator.add(requests)
        self._had |= {item.rollout_id: len(item.generated) if item.generated else 0 for item in requests}

    def step(self) -> list[Completion]:
        return self._count(self._generator.step())

    def abort(self, rollout_ids: Sequence[RolloutId]) -> list[Completion]:
        return self._count(self._generator.abort(rollout_ids))

    def _count(self, completions: list[Completion]) -> list[Completion]:
        for completion in completions:
            self._num_ended += len(completion.generated) - self._had.pop(completion.rollout_id)
        return completions


def measure(say: Callable[[str], None]) -> tuple[list[Row], list[Row]]:
    """Return rows of raw figures, and targets computed from them."""
    torch.set_num_threads(1)
    rows = [closed_forms()]
    say(f"closed forms: largest error {rows[0]['largest_error']:.1e}")
    for name, overrides in _SCHEDULES.items():
        row = accounts(name, [overrides[0], *_COMMON, *overrides[1:]])
        say(
            f"{name}: {row['engine_tokens']} tokens = {row['training_tokens']} of training +"
            f" {row['evaluation_tokens']} of {len(row['versions'])} evaluations"
        )
        rows.append(row)
    return rows, _targets(rows)


def accounts(name: str, overrides: Sequence[str]) -> Row:
    """Train with and without evaluations; return the tokens of both, and compare the results with `midflight eval`."""
    recipe = load_recipe(SHIPPED_RECIPES["cpu_demo"], [*overrides, f"eval.every={_EVERY}"])
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as other:
        loops, counter = _run(recipe, Path(directory))
        run = RunDirectory(Path(directory))
        lines = read_evaluations(run.evaluations)
        evaluation = loops.evaluation
        assert evaluation
        differences = [_num_differences(recipe, run, line) for line in lines]
        without, counter_without = _run(load_recipe(SHIPPED_RECIPES["cpu_demo"], overrides), Path(other))
    return {
        "name": name,
        "versions": [line["version"] for line in lines],
        "engine_tokens": counter.num_sampled,
        "training_tokens": loops.actor.state.generated_tokens,
        "evaluation_tokens": sum(line["generated_tokens"] for line in lines),
        "tokens_of_a_dropped_evaluation": evaluation.num_generated - sum(line["generated_tokens"] for line in lines),
        "different_values": sum(differences),
        "engine_tokens_without_evaluation": counter_without.num_sampled,
        "same_batches": _trajectories(loops) == _trajectories(without),
    }


def closed_forms() -> Row:
    """Compare expectations of pass@k and maj@k over all answer tables of one problem with their closed forms."""
    errors = []
    for p, num_samples in itertools.product((0.05, 0.3, 0.5, 0.9), (1, 2, 5, 8)):
        counts = np.arange(num_samples + 1)
        chances = [math.comb(num_samples, c) * p**c * (1 - p) ** (num_samples - c) for c in counts]
        for k in range(1, num_samples + 1):
            errors.append(abs(float(np.dot(chances, pass_at_k(counts, num_samples, k))) - (1 - (1 - p) ** k)))
        if num_samples % 2:  # without ties, the majority of a right and a wrong answer is a binomial tail
            correct = [[index < c for index in range(num_samples)] for c in counts]
            answers = [["right" if item else "wrong" for item in row] for row in correct]
            expectation = float(np.dot(chances, majority_correctness(answers, np.array(correct))))
            errors.append(abs(expectation - sum(chances[num_samples // 2 + 1 :])))
    return {"name": "closed forms", "num_compared": len(errors), "largest_error": max(errors)}


def _run(recipe: Recipe, directory: Path) -> tuple[Loops, CountingGenerator]:
    """Train; return the loops after the end of rollouts and evaluations in flight, and the counter."""
    counters: list[CountingGenerator] = []

    def counted(generator: Generator) -> Generator:
        counters.append(CountingGenerator(generator))
        return counters[-1]

    loops = run_steps(recipe, directory, _NUM_STEPS, counted)
    loops.rollouts.run(lambda: True)
    return loops, counters[0]


def _num_differences(recipe: Recipe, run: RunDirectory, line: Mapping[str, Any]) -> int:
    """Number of values of an evaluation that differ from those of `midflight eval` on the checkpoint."""
    alone = evaluate_model(recipe, checkpoint_of(run.checkpoints, line["version"])).to_json()
    return sum(line[key] != value for key, value in alone.items())


def _trajectories(loops: Loops) -> list[bytes]:
    return [
        microbatch.token_ids.tobytes() + microbatch.weight_versions.tobytes()
        for batch in loops.stream.appended[:_NUM_STEPS]
        for rank in batch.microbatches
        for microbatch in rank
    ]


def _targets(rows: Sequence[Row]) -> list[Row]:
    forms, *runs = rows
    error = forms["largest_error"]
    targets = [{"name": "closed forms: largest error", "value": error, "limit": 1e-12, "holds": error <= 1e-12}]
    for row in runs:
        evaluation_tokens = row["evaluation_tokens"] + row["tokens_of_a_dropped_evaluation"]
        extra = row["engine_tokens"] - row["training_tokens"] - evaluation_tokens
        figures = {
            "engine tokens beyond training and evaluation": extra,
            "values that differ from midflight eval": row["different_values"],
        }
        if row["name"] == "conventional":  # the only schedule whose batches do not depend on the lengths of others
            cost = row["engine_tokens"] - row["engine_tokens_without_evaluation"] - evaluation_tokens
            figures["multiples of eval.every without an evaluation"] = _NUM_STEPS // _EVERY - len(row["versions"])
            figures["tokens that evaluation costs beyond its own"] = cost
            figures["batches that differ from a run without evaluation"] = int(not row["same_batches"])
        for name, value in figures.items():
            targets.append({"name": f"{row['name']}: {name}", "value": value, "limit": 0, "holds": value == 0})
    return targets
