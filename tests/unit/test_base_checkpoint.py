"""Shipped starting policy: small, complete, and loadable without a network."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from midflight.config import SHIPPED_RECIPES
from midflight.envs.chain_sums import DIGITS, LABELS, ChainSums, solution

CHECKPOINT = SHIPPED_RECIPES["cpu_demo"].parent / "models" / "chain_sums"
TASK_CHARACTERS = "0" + DIGITS + LABELS + ",:="


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, local_files_only=True)


def test_the_checkpoint_is_at_most_three_megabytes() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 3_000_000


def test_every_character_of_the_task_is_one_known_token(tokenizer: PreTrainedTokenizerBase) -> None:
    token_ids = tokenizer.encode(TASK_CHARACTERS)
    assert len(set(token_ids)) == len(TASK_CHARACTERS) == len(token_ids)
    assert set(token_ids).isdisjoint(tokenizer.all_special_ids)


@given(text=st.text(TASK_CHARACTERS, max_size=200))
def test_tokenization_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == len(text)
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.decode([*token_ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_unknown_characters_are_detectable(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in ("a1é", "a 1", "A1"):
        assert tokenizer.decode(tokenizer.encode(text)) != text


def test_model_and_tokenizer_agree(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    assert model.config.vocab_size == len(tokenizer)
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}) == 4
    longest = 2 * 24 + 1 + 160
    assert model.config.max_position_embeddings >= longest


def test_the_model_is_small_and_float32(model: PreTrainedModel) -> None:
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 300_000 <= model.num_parameters() <= 650_000


@torch.inference_mode()
def test_the_model_can_add_in_steps_but_often_guesses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Reinforcement learning needs both: a skill in the base model, and room for improvement."""
    hits = steps = 0
    start_with_steps = []
    for problem in ChainSums().held_out_problems(48):
        written = solution(problem)
        token_ids = tokenizer(problem.text + written, return_tensors="pt")["input_ids"]
        probabilities = model(token_ids).logits.softmax(-1)[0]
        start = len(problem.text)
        predicted = probabilities[start - 1 : -1].argmax(-1)
        start_with_steps.append(float(probabilities[start - 1, tokenizer.encode("a")[0]]))
        digit_or_comma = torch.tensor([character in "0123456789," for character in written])
        hits += int((predicted == token_ids[0, start:])[digit_or_comma].sum())
        steps += int(digit_or_comma.sum())
    assert hits / steps > 0.95
    assert 0.25 < sum(start_with_steps) / len(start_with_steps) < 0.65
