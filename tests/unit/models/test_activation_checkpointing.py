"""Which layers are computed again, and what happens with a model that does not say."""

from __future__ import annotations

import pytest

from midflight.errors import ModelError
from midflight.models.activation_checkpointing import check_layers, decoder_layers
from midflight.testing.tiny_models import tiny_model


def test_decoder_layers_are_what_the_model_repeats() -> None:
    model = tiny_model("qwen2")
    assert decoder_layers(model) == list(model.model.layers)
    check_layers(model)


def test_a_model_that_does_not_say_which_they_are_has_none() -> None:
    model = tiny_model("qwen2")
    model._no_split_modules = None
    assert decoder_layers(model) == []
    with pytest.raises(ModelError, match=r"trainer\.activation_checkpointing: Qwen2ForCausalLM does not say"):
        check_layers(model)
