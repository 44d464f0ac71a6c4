"""Prompts, responses and stop tokens, with tokenizers that add BOS and models that list several stop tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import ModelError
from midflight.launch.build import build_actor_config, check_evaluation
from midflight.models.loading import load_tokenizer, stop_token_ids
from midflight.models.prompts import PromptFormat
from midflight.models.text import encode_chat, encode_text, response_text
from midflight.types import FinishReason, GeneratedTokens

RECIPE = SHIPPED_RECIPES["cpu_demo"]
MODEL = RECIPE.parent / "models" / "chain_sums"
BOS, EOS, UNK = 1, 2, 3


def generated(*token_ids: int) -> GeneratedTokens:
    zeros = np.zeros(len(token_ids), np.float32)
    return GeneratedTokens(np.array(token_ids, np.int32), zeros, zeros.astype(np.int32))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.fixture
def adds_bos(model: Path) -> PreTrainedTokenizerFast:
    """Tokenizer that puts BOS before every text, like Llama's."""
    tokenizer: PreTrainedTokenizerFast = load_tokenizer(model)
    post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer._tokenizer.post_processor = post_processor
    return tokenizer


def test_prompt_has_bos_exactly_once(adds_bos: PreTrainedTokenizerFast) -> None:
    a = adds_bos.convert_tokens_to_ids("a")
    assert encode_text(adds_bos, "a") == [BOS, a]
    assert encode_text(adds_bos, "<bos>a") == [BOS, a]


def test_chat_template_with_bos_gets_no_second_bos(adds_bos: PreTrainedTokenizerFast) -> None:
    adds_bos.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert encode_chat(adds_bos, [{"role": "user", "content": "a"}]) == encode_text(adds_bos, "a")


def test_response_text_has_no_stop_token_or_special_tokens() -> None:
    tokenizer = load_tokenizer(MODEL)
    one, two = tokenizer.encode("12")
    assert response_text(tokenizer, generated(one, BOS, two, EOS), FinishReason.STOP) == "12"
    # The tokenizer treats a stop token listed by the model as text, but it is not part of the response.
    assert response_text(tokenizer, generated(one, two), FinishReason.STOP) == "1"
    assert response_text(tokenizer, generated(one, two), FinishReason.LENGTH) == "12"


def test_every_listed_stop_token_stops_a_response(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, EOS, 7, 999, -1]}))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    tokenizer = load_tokenizer(model)
    assert stop_token_ids(model, PromptFormat(tokenizer)) == (EOS, 9, 7, 5)
    recipe = load_recipe(RECIPE, [f"model.path={model}"])
    assert build_actor_config(recipe, PromptFormat(tokenizer)).sampling.stop_token_ids == (EOS, 9, 7, 5)


def test_default_eos_of_transformers_is_ignored(model: Path) -> None:
    """In a Llama configuration without an EOS token, transformers inserts its default, 2."""
    (model / "generation_config.json").unlink()
    config = json.loads((model / "config.json").read_text()) | {"model_type": "llama"}
    del config["eos_token_id"]
    (model / "config.json").write_text(json.dumps(config))
    tokenizer: PreTrainedTokenizerFast = load_tokenizer(MODEL)
    tokenizer.eos_token = None
    assert stop_token_ids(model, PromptFormat(tokenizer)) == ()


@pytest.mark.parametrize("ids", [[], list(range(9))], ids=len)
def test_model_without_stop_tokens_or_with_too_many_is_rejected(model: Path, ids: list[int]) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((model / name).read_text()) | {"eos_token_id": ids, "eos_token": None}
        (model / name).write_text(json.dumps(values))
    with pytest.raises(ModelError, match=f"{len(ids)} end-of-sequence tokens; the engine needs at least 1"):
        check_evaluation(load_recipe(RECIPE, [f"model.path={model}"]))


def test_damaged_generation_config_is_a_clear_error(model: Path) -> None:
    (model / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json cannot be loaded: Expecting"):
        stop_token_ids(model, PromptFormat(load_tokenizer(model)))
