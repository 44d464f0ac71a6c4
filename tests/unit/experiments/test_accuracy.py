"""Time to each level of accuracy, from checkpoints that hold only their clock."""

from __future__ import annotations

from pathlib import Path

from midflight.experiments.accuracy import accuracy_figures
from midflight.trainer.checkpoints import checkpoints_in, save_checkpoint
from midflight.trainer.state import TrainerState


def make_checkpoints(directory: Path, num: int) -> list[Path]:
    """Save checkpoints ten steps and five seconds apart."""
    for index in range(1, num + 1):
        state = TrainerState(version=10 * index, wall_s=5.0 * index)
        save_checkpoint(directory, state, lambda path: None, keep=100)
    return checkpoints_in(directory)


def test_checkpoints_are_listed_by_their_steps(tmp_path: Path) -> None:
    names = [checkpoint.name for checkpoint in make_checkpoints(tmp_path, 10)]
    assert names == [f"step_{10 * index}" for index in range(1, 11)]


def test_each_level_has_the_clock_of_its_first_checkpoint(tmp_path: Path) -> None:
    accuracies = {
        "step_10": 0.5,
        "step_20": 0.82,
        "step_30": 0.7,
        "step_40": 0.87,
        "step_50": 0.9,
        "step_60": 1.0,
        "step_70": 0.75,
    }
    evaluated = []

    def accuracy(checkpoint: Path) -> float:
        evaluated.append(checkpoint.name)
        return accuracies[checkpoint.name]

    figures = accuracy_figures(make_checkpoints(tmp_path, 7), accuracy)
    assert figures == {
        "seconds_to_accuracy": {"0.8": 10.0, "0.85": 20.0, "0.9": 25.0},
        "steps_to_accuracy": {"0.8": 20, "0.85": 40, "0.9": 50},
        "final_accuracy": 0.75,
    }
    assert evaluated == [*list(accuracies)[:5], "step_70"], "in order up to the highest level, then the newest"


def test_levels_that_are_not_reached_are_null(tmp_path: Path) -> None:
    figures = accuracy_figures(make_checkpoints(tmp_path, 2), lambda _: 0.81)
    assert figures["seconds_to_accuracy"] == {"0.8": 5.0, "0.85": None, "0.9": None}
    empty = accuracy_figures([], lambda _: 1.0)
    assert set(empty["steps_to_accuracy"].values()) == {empty["final_accuracy"]} == {None}
