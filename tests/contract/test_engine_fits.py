"""A server joins a run only if it can do what the run needs."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import GenerationLostError, ModelError
from midflight.run.engines import connect
from midflight.testing.tiny_models import VOCAB_SIZE

RECIPE = SHIPPED_RECIPES["cpu_demo"]
FITS = ("engine.max_prompt_tokens=32", "sampling.max_tokens=24")


def test_a_server_that_fits(server) -> None:
    connect(load_recipe(RECIPE, FITS), server.url, threading.Event()).close()


def test_sequences_that_are_too_long_for_it(server) -> None:
    recipe = load_recipe(RECIPE, ["engine.max_prompt_tokens=33", "sampling.max_tokens=24"])
    with pytest.raises(ModelError, match=r"up to 56 tokens, and engine\.max_prompt_tokens .* = 57"):
        connect(recipe, server.url, threading.Event())


def test_another_vocabulary(server, tmp_path: Path) -> None:
    config = json.loads((RECIPE.parent / "models" / "chain_sums" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 99}))
    recipe = load_recipe(RECIPE, [*FITS, f"model.path={tmp_path}"])
    with pytest.raises(ModelError, match=f"a vocabulary of {VOCAB_SIZE} tokens, and that of model.path = .* has 99"):
        connect(recipe, server.url, threading.Event())


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nothing", "http://[", "ftp://127.0.0.1"])
def test_nobody_is_there(url: str) -> None:
    with pytest.raises(GenerationLostError):
        connect(load_recipe(RECIPE, FITS), url, threading.Event())
