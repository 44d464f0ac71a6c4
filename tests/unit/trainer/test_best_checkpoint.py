"""The best checkpoint is kept and named; checkpoints that wait for their evaluation are kept, too."""

from __future__ import annotations

from pathlib import Path

from midflight.metrics.evaluations import append_evaluation
from midflight.trainer.best_checkpoint import BestCheckpoint, best_checkpoint
from midflight.trainer.checkpoints import checkpoints_in, oldest_checkpoint_version, save_checkpoint, version_of
from midflight.trainer.state import TrainerState


class Directory:
    """Checkpoints of a run with keep_checkpoints = 1, evaluated at every tenth step."""

    def __init__(self, path: Path) -> None:
        self.path, self.evaluations = path / "checkpoints", path / "evaluations.jsonl"
        self.best = BestCheckpoint(self.path, self.evaluations, every=10)

    def save(self, version: int) -> list[int]:
        """Save a checkpoint as the training loop does; return the versions that are there."""
        also = self.best.versions_to_keep()
        save_checkpoint(self.path, TrainerState(version=version), lambda path: None, keep=1, also_keep=also)
        self.best.update_link()
        return [version_of(path) for path in checkpoints_in(self.path)]

    def evaluate(self, version: int, score: float) -> None:
        sets = {"sums": {"avg": {"value": score}}}
        append_evaluation(self.evaluations, version, {"sets": sets})

    @property
    def link(self) -> str | None:
        best = best_checkpoint(self.path)
        return best.name if best else None


def test_the_best_checkpoint_survives_newer_ones(tmp_path: Path) -> None:
    run = Directory(tmp_path)
    assert (run.save(10), run.link) == ([10], None)
    run.evaluate(10, 0.5)
    assert (run.save(15), run.link) == ([10, 15], "step_10")
    assert run.save(20) == [10, 20]
    run.evaluate(20, 0.4)
    assert (run.save(30), run.link) == ([10, 30], "step_10")
    run.evaluate(30, 0.6)
    assert (run.save(35), run.link) == ([30, 35], "step_30")


def test_checkpoints_wait_for_their_evaluation(tmp_path: Path) -> None:
    run = Directory(tmp_path)
    run.save(10)
    run.save(15)
    assert run.save(20) == [10, 20]
    assert run.save(25) == [10, 20, 25]
    run.evaluate(20, 0.3)  # version 10 was left out: its evaluation can never come
    assert run.save(30) == [20, 30]


def test_an_evaluated_version_without_a_checkpoint_is_not_the_best(tmp_path: Path) -> None:
    run = Directory(tmp_path)
    run.save(10)
    run.evaluate(10, 0.5)
    run.evaluate(20, 0.9)
    run.save(15)
    assert run.link == "step_10"


def test_batches_of_an_old_best_checkpoint_are_not_kept(tmp_path: Path) -> None:
    run = Directory(tmp_path)
    run.save(10)
    run.evaluate(10, 0.5)
    assert run.save(40) == [10, 40]
    assert oldest_checkpoint_version(run.path, among=1) == 40
    assert oldest_checkpoint_version(run.path, among=2) == 10
