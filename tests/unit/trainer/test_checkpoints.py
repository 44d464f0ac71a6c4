"""Checkpoints that were damaged after they were written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from midflight.errors import CheckpointError
from midflight.trainer.checkpoints import checkpoints_in, newest_whole_checkpoint, save_checkpoint
from midflight.trainer.state import TrainerState


def write_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (directory / "config.json").write_text("{}")
    (directory / "adapter").mkdir()
    (directory / "adapter" / "adapter_model.safetensors").write_bytes(bytes(range(64)))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for version in (2, 4, 6):
        save_checkpoint(tmp_path, TrainerState(version=version), write_weights, keep=3)
    return tmp_path


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def names(directory: Path) -> list[str]:
    return [checkpoint.name for checkpoint in checkpoints_in(directory)]


def test_newest_checkpoint_is_used_without_a_report(checkpoints: Path) -> None:
    newest = newest_whole_checkpoint(checkpoints, lambda text: pytest.fail(text))
    assert newest == checkpoints / "step_6"
    assert newest_whole_checkpoint(checkpoints / "none", lambda text: pytest.fail(text)) is None


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, Path.unlink])
@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "adapter/adapter_model.safetensors", "trainer_state.json", "hashes.json"],
)
def test_damaged_checkpoint_is_reported_and_the_previous_one_used(
    checkpoints: Path, damage: Callable[[Path], None], name: str
) -> None:
    damage(checkpoints / "step_6" / name)
    reports: list[str] = []
    assert newest_whole_checkpoint(checkpoints, reports.append) == checkpoints / "step_4"
    (line,) = reports
    assert name in line or name == "hashes.json"
    assert line.startswith("step_6 is damaged and not used, as ")
    assert line.endswith("; training resumes from step_4")
    assert names(checkpoints) == ["step_2", "step_4"]
    assert (checkpoints / "damaged_step_6").is_dir()


def test_damaged_version_can_be_saved_again(checkpoints: Path) -> None:
    for _ in range(2):
        truncate(checkpoints / "step_6" / "model.safetensors")
        newest_whole_checkpoint(checkpoints, lambda text: None)
        save_checkpoint(checkpoints, TrainerState(version=6), write_weights, keep=3)
    assert newest_whole_checkpoint(checkpoints, lambda text: pytest.fail(text)) == checkpoints / "step_6"
    assert names(checkpoints) == ["step_2", "step_4", "step_6"]


def test_unexpected_file_counts_as_damage(checkpoints: Path) -> None:
    (checkpoints / "step_6" / "model-00002.safetensors").write_bytes(b"")
    assert newest_whole_checkpoint(checkpoints, lambda text: None) == checkpoints / "step_4"


def test_nothing_is_renamed_if_all_checkpoints_are_damaged(checkpoints: Path) -> None:
    for version in (2, 4, 6):
        flip_a_bit(checkpoints / f"step_{version}" / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"all checkpoints in .* are damaged; in step_6, the newest, model\.safetensors"
    ):
        newest_whole_checkpoint(checkpoints, lambda text: pytest.fail(text))
    assert names(checkpoints) == ["step_2", "step_4", "step_6"]
