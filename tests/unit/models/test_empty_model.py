"""A model built without weights equals an ordinarily loaded model in everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from midflight.models.loading import empty_model, load_model, saved_tensors_of
from midflight.testing.tiny_models import tiny_model

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in ("qwen2", "qwen3", "llama", "gpt2", "gemma2", "gemma3")),
    ("qwen2", {"tie_word_embeddings": True}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
]


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_filled_empty_model_equals_loaded_model(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(family, **options).save_pretrained(tmp_path)
    expected: Any = load_model(tmp_path)
    model: Any = empty_model(tmp_path)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    assert all(parameter.is_meta for parameter in model.parameters())
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    model._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
    model.tie_weights()
    with torch.no_grad():
        for name, tensor in saved_tensors_of(expected).items():
            saved_tensors_of(model)[name].copy_(tensor)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert not model.training
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
