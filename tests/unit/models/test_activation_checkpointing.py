"""Activation checkpointing finds the decoder layers and rejects a model that does not declare them."""

from __future__ import annotations

import pytest

from midflight.errors import ModelError
from midflight.models.activation_checkpointing import check_layers, decoder_layers
from midflight.testing.tiny_models import tiny_model


def test_decoder_layers_are_found() -> None:
    model = tiny_model("qwen2")
    assert decoder_layers(model) == list(model.model.layers)
    check_layers(model)


def test_model_without_declared_decoder_layers_is_rejected() -> None:
    model = tiny_model("qwen2")
    model._no_split_modules = None
    assert decoder_layers(model) == []
    with pytest.raises(ModelError, match=r"trainer\.activation_checkpointing: Qwen2ForCausalLM does not declare"):
        check_layers(model)
