"""Tensors in files of a bounded size that transformers can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from midflight.errors import CheckpointError
from midflight.models.loading import saved_tensors_of
from midflight.testing.tiny_models import tiny_model
from midflight.trainer.saved_tensors import SavedTensors, save_tensors
from midflight.weights.specs import specs_of

TENSORS = {"b": torch.ones(4), "a": torch.arange(6.0).reshape(3, 2), "step": torch.tensor(2.0), "c": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("file_bytes", "num_files"),
    [(1 << 20, 1), (40, 2), (20, 3), (1, 4)],
    ids=["one file", "several files", "tensor larger than a file", "one file per tensor"],
)
def test_saved_tensors_are_read_back(tmp_path: Path, file_bytes: int, num_files: int) -> None:
    save_tensors(tmp_path, "things", specs_of(TENSORS), TENSORS.items(), file_bytes)
    assert len(list(tmp_path.glob("things*.safetensors"))) == num_files
    with SavedTensors(tmp_path, "things") as saved:
        assert saved.names == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert torch.equal(saved.read(name), tensor)
            target = torch.full_like(tensor, -1.0)
            saved.fill(target, name)
            assert torch.equal(target, tensor)


def test_empty_set_of_tensors_is_a_file(tmp_path: Path) -> None:
    save_tensors(tmp_path, "optimizer", (), [])
    with SavedTensors(tmp_path, "optimizer") as saved:
        assert not saved.names


def test_views_of_one_storage_can_be_saved(tmp_path: Path) -> None:
    storage = torch.arange(10.0)
    parts = {"head": storage[:4], "tail": storage[4:]}
    save_tensors(tmp_path, "parts", specs_of(parts), parts.items())
    with SavedTensors(tmp_path, "parts") as saved:
        assert torch.equal(saved.read("tail"), storage[4:])


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize("file_bytes", [1 << 20, 10_000])
def test_transformers_reads_a_saved_model(tmp_path: Path, family: str, file_bytes: int) -> None:
    model = tiny_model(family)
    tensors = saved_tensors_of(model)
    model.config.save_pretrained(tmp_path)
    save_tensors(tmp_path, "model", specs_of(tensors), tensors.items(), file_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (file_bytes == 10_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_missing_tensor_or_wrong_shape_is_an_error(tmp_path: Path) -> None:
    save_tensors(tmp_path, "things", specs_of(TENSORS), TENSORS.items())
    with SavedTensors(tmp_path, "things") as saved:
        with pytest.raises(CheckpointError, match="has no tensor z"):
            saved.fill(torch.zeros(1), "z")
        with pytest.raises(CheckpointError, match=r"a in .* has shape \[3, 2\], not \[2, 3\]"):
            saved.fill(torch.zeros(2, 3), "a")


@pytest.mark.parametrize("index", ["{", json.dumps({"weight_map": {"a": "gone.safetensors"}}), "{}"])
def test_unreadable_files_are_one_error(tmp_path: Path, index: str) -> None:
    with pytest.raises(CheckpointError, match=r"the model tensors in .* cannot be read"):
        SavedTensors(tmp_path, "model")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"the model tensors in .* cannot be read"):
        SavedTensors(tmp_path, "model")
