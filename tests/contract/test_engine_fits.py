"""Checks of a server before it joins a run: sequence length and vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from midflight.concurrency.event_loop import EventLoopThread
from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import GenerationLostError, ModelError
from midflight.run.servers import connect
from midflight.testing.tiny_models import VOCAB_SIZE

if TYPE_CHECKING:
    from contract.conftest import Server

RECIPE = SHIPPED_RECIPES["cpu_demo"]
FITS = ("engine.max_prompt_tokens=32", "sampling.max_tokens=24")


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    with closing(EventLoopThread("test")) as loop:
        yield loop


def test_a_matching_server_connects(server: Server, loop: EventLoopThread) -> None:
    connect(load_recipe(RECIPE, FITS), "run", loop, server.url, str).close()


def test_a_server_with_shorter_sequences_is_refused(server: Server, loop: EventLoopThread) -> None:
    recipe = load_recipe(RECIPE, ["engine.max_prompt_tokens=33", "sampling.max_tokens=24"])
    with pytest.raises(ModelError, match=r"up to 56 tokens, and engine\.max_prompt_tokens .* = 57"):
        connect(recipe, "run", loop, server.url, str)


def test_a_server_with_another_vocabulary_is_refused(server: Server, tmp_path: Path, loop: EventLoopThread) -> None:
    config = json.loads((RECIPE.parent / "models" / "chain_sums" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 99}))
    recipe = load_recipe(RECIPE, [*FITS, f"model.path={tmp_path}"])
    with pytest.raises(ModelError, match=f"a vocabulary of {VOCAB_SIZE} tokens, and that of model.path = .* has 99"):
        connect(recipe, "run", loop, server.url, str)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nothing", "http://[", "ftp://127.0.0.1"])
def test_a_url_without_server_is_an_error(url: str, loop: EventLoopThread) -> None:
    with pytest.raises(GenerationLostError):
        connect(load_recipe(RECIPE, FITS), "run", loop, url, str)
