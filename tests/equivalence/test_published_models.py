"""Published families, from directories as their publishers lay them out: engine, trainer and transformers agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from midflight.engine.decoder import Decoder
from midflight.engine.engine import Engine, EngineLimits
from midflight.engine.loading import check_engine_runs, engine_model
from midflight.models.loading import (
    check_model_directory,
    load_config,
    load_model,
    load_tokenizer,
    stop_token_ids,
    weights_of,
)
from midflight.models.policy import PackedPolicy
from midflight.models.prompts import PromptFormat
from midflight.preprocess.packing import pack
from midflight.testing.tiny_models import stage_and_adopt
from midflight.types import Completion, GenerationRequest, RolloutId, SamplingParams, Trajectory
from published_models import PUBLISHED, VOCAB_SIZE, write_published_model

DirectoryOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> DirectoryOf:
    written: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in written:
            written[name] = write_published_model(name, tmp_path_factory.mktemp("models") / name)
        return written[name]

    return directory


def requests(stop: tuple[int, ...]) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB_SIZE, length).astype(np.int32) for length in (1, 5, 16, 17, 30, 40)]
    return [
        GenerationRequest(RolloutId(index), prompt, SamplingParams(24, 0.8, stop), 3)
        for index, prompt in enumerate(prompts)
    ]


def run_to_end(engine: Engine) -> list[Completion]:
    completions: list[Completion] = []
    while engine.num_in_flight:
        completions += engine.step()
    return completions


def by_transformers(model: Any, request: GenerationRequest, completion: Completion) -> np.ndarray:
    """Log-probabilities of the sampled tokens by transformers: one sequence, no cache, its own attention."""
    tokens = torch.from_numpy(np.concatenate([request.prompt_token_ids, completion.generated.token_ids])).long()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0].float() / 0.8, -1)
    start = len(request.prompt_token_ids)
    return logprobs[start - 1 : -1].gather(1, tokens[start:, None]).squeeze(1).numpy()


def by_trainer(model: Any, request: GenerationRequest, completion: Completion) -> np.ndarray:
    token_ids = np.concatenate([request.prompt_token_ids, completion.generated.token_ids])
    zeros = np.zeros(len(token_ids), np.float32)
    sampled = np.arange(len(token_ids)) >= len(request.prompt_token_ids)
    (packed,) = pack([Trajectory(RolloutId(0), token_ids, sampled, zeros, zeros.astype(np.int32), zeros, 0.0, 0)], 1000)
    with torch.no_grad():
        logprobs: np.ndarray = PackedPolicy(model, 0.8)(packed)[0].logprobs.numpy()
    return logprobs


def plain_model(directory: Path) -> Any:
    """Load the published model without any part of this package."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", PUBLISHED)
def test_end_tokens_are_the_published_ones(name: str, directory_of: DirectoryOf) -> None:
    directory = directory_of(name)
    check_model_directory(directory)
    tokenizer: Any = load_tokenizer(directory)
    expected = tuple(tokenizer.convert_tokens_to_ids(token) for token in PUBLISHED[name].stop_tokens)
    assert stop_token_ids(directory, PromptFormat(tokenizer)) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_match_transformers_under_their_version(name: str, directory_of: DirectoryOf) -> None:
    """Weights change in flight; engine, trainer and transformers agree on each token, by the weights of its version."""
    directory = directory_of(name)
    config = load_config(directory)
    check_engine_runs(config)
    trained, plain = load_model(directory), plain_model(directory)
    runner = engine_model(config, weights_of(trained), max_length=64)
    assert isinstance(runner, Decoder) == PUBLISHED[name].fused
    limits = EngineLimits(max_num_seqs=6, max_prompt_tokens=40, max_new_tokens=24, max_batched_tokens=21)
    engine = Engine(runner, limits, recompute_kv=True)
    asked = requests(stop_token_ids(directory, PromptFormat(load_tokenizer(directory))))
    engine.add(asked)
    completions = [completion for _ in range(12) for completion in engine.step()]
    changed = {key: weight * 0.9 for key, weight in weights_of(trained).items()}
    stage_and_adopt(engine, 1, changed)
    completions += run_to_end(engine)
    assert len(completions) == len(asked)
    old = [by_transformers(plain, asked[each.rollout_id], each) for each in completions]
    old_trained = [by_trainer(trained, asked[each.rollout_id], each) for each in completions]
    for model in (plain, trained):
        model.load_state_dict(changed, strict=False)
    num_tokens = [0, 0]
    for completion, *before in zip(completions, old, old_trained, strict=True):
        request, generated = asked[completion.rollout_id], completion.generated
        after = by_transformers(plain, request, completion), by_trainer(trained, request, completion)
        for one, two in zip(before, after, strict=True):
            expected = np.where(generated.weight_versions == 0, one, two)
            np.testing.assert_allclose(generated.logprobs, expected, atol=1e-4)
        for version in (0, 1):
            num_tokens[version] += int((generated.weight_versions == version).sum())
    assert min(num_tokens) > 10
