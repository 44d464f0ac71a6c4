"""The engine on the device against the engine on the CPU: the same tokens, and log-probabilities within 1e-4 (float32).

Random numbers depend on the request and the position only, so sampled tokens have to be equal, too.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from benchmarks.gpu.generation import compare, engine_on, engine_on_cpu, generate, requests, run_to_end
from benchmarks.gpu.models import random_model
from benchmarks.gpu.setting import Row, Setting
from midflight.engine.cache import page_bytes
from midflight.engine.engine import Engine, EngineLimits
from midflight.engine.loading import engine_model
from midflight.models.attention import register_packed_attention
from midflight.models.loading import load_config, load_model, weights_of
from midflight.protocols import IncomingWeights
from midflight.testing.tiny_models import VOCAB_SIZE, stage_and_adopt, tiny_model
from midflight.types import Completion

_FUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen2", {"num_key_value_heads": 4}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48}),
)
_MODULES: tuple[tuple[str, dict[str, Any]], ...] = (("llama", {}), ("gpt2", {}), ("gemma2", {}), ("gemma3", {}))
# Bfloat16 rounds to 3 digits. A wrong token, page or position differs by 1 and more.
_BFLOAT16_MEAN, _FLOAT32_MAX = 0.05, 1e-3


def fused_decoder(setting: Setting) -> list[Row]:
    """Compare the fused decoder, every kernel launched by itself."""
    return _families(setting, _FUSED, fused=True, graphs=False)


def fused_decoder_with_graphs(setting: Setting) -> list[Row]:
    """Compare the fused decoder, decode steps replayed."""
    return _families(setting, _FUSED, fused=True, graphs=True)


def transformers_modules(setting: Setting) -> list[Row]:
    """Compare modules of transformers with the engine's attention: soft caps and sliding windows among them."""
    return _families(setting, _MODULES, fused=False, graphs=False)


def transformers_modules_with_graphs(setting: Setting) -> list[Row]:
    """Compare modules of transformers, decode steps replayed."""
    return _families(setting, _MODULES, fused=False, graphs=True)


def mixture_of_experts(setting: Setting) -> list[Row]:
    """Compare a model whose experts depend on the token."""
    config = MixtralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        attn_implementation=register_packed_attention(),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    asked = requests(9, VOCAB_SIZE)
    expected = generate(engine_on_cpu(model), asked)
    return [compare(generate(engine_on(setting, model, graphs=True), asked), expected, "mixtral")]


def _families(
    setting: Setting, families: tuple[tuple[str, dict[str, Any]], ...], *, fused: bool, graphs: bool
) -> list[Row]:
    rows = []
    for family, options in families[: 2 if setting.small else None]:
        model = tiny_model(family, **options)
        for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (0.7, 0.9)):
            asked = requests(18, VOCAB_SIZE, temperature=temperature, top_p=top_p)
            expected = generate(engine_on_cpu(model, fused=fused), asked)
            actual = generate(engine_on(setting, model, fused=fused, graphs=graphs), asked)
            what = f"{family} {options or ''} temperature {temperature} top_p {top_p}"
            rows.append({"fused": fused, "graphs": graphs, **compare(actual, expected, what)})
    return rows


def preemption_and_prefix_cache(setting: Setting) -> list[Row]:
    """Compare an engine whose cache is too small for its sequences: it preempts them and copies shared pages."""
    model = tiny_model("qwen2")
    shape = engine_on_cpu(model)._model.shape
    small = 20 * page_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, torch.float32)
    asked = requests(24, VOCAB_SIZE)
    engine = engine_on(setting, model, kv_cache_bytes=small)
    row = compare(generate(engine, asked), generate(engine_on_cpu(model), asked), "20 pages")
    assert engine.num_preempted, "nothing was preempted"
    return [{**row, "preempted": engine.num_preempted}]


def update_in_flight(setting: Setting) -> list[Row]:
    """Update between steps: later tokens carry the new version, and later requests equal those of a fresh engine."""
    return _updates(setting, recompute_kv=False)


def recompute_kv(setting: Setting) -> list[Row]:
    """Update between steps, with keys and values computed again by the new weights."""
    return _updates(setting, recompute_kv=True)


def _updates(setting: Setting, *, recompute_kv: bool) -> list[Row]:
    old, new = tiny_model(seed=0), tiny_model(seed=1)

    def run(engine: Engine) -> dict[int, Completion]:
        engine.add(requests(10, VOCAB_SIZE))
        completions: dict[int, Completion] = {}
        for version, model in enumerate((new, old, new), start=1):  # both sets of weights are replaced
            for _ in range(6):
                completions |= {completion.rollout_id: completion for completion in engine.step()}
            stage_and_adopt(engine, version, weights_of(model))
        return completions | run_to_end(engine)

    engine = engine_on(setting, old, recompute_kv=recompute_kv)
    actual = run(engine)
    versions = {int(version) for each in actual.values() for version in each.generated.weight_versions}
    assert versions >= {0, 1, 2, 3}, f"tokens carry the versions {versions}"
    rows = [compare(actual, run(engine_on_cpu(old, recompute_kv=recompute_kv)), "sequences across three updates")]
    later = requests(10, VOCAB_SIZE, seed=3)
    fresh = generate(engine_on(setting, new, version=3), later)
    return [*rows, compare(generate(engine, later), fresh, "requests after the updates")]


def staging_beside_graph_captures(setting: Setting) -> list[Row]:
    """Stage weights from another thread while steps of ever new batch sizes are captured."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = engine_on(setting, old, max_num_seqs=32)
    ended, errors, num_staged = threading.Event(), list[Exception](), 0

    def stage() -> None:
        nonlocal num_staged
        try:
            while not ended.is_set():
                num_staged += 1
                model = new if num_staged % 2 else old
                engine.stage(IncomingWeights(num_staged, num_staged, weights_of(model).items()))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=stage)
    thread.start()
    try:
        for round_index in range(3):
            generate(engine, requests(29, VOCAB_SIZE, first_id=100 * round_index))
            engine.adopt(engine.weight_version + 1)
    finally:
        ended.set()
        thread.join()
    assert not errors, f"staging failed: {errors[0]!r}"
    stage_and_adopt(engine, num_staged + 1, weights_of(new))
    asked = requests(12, VOCAB_SIZE, seed=5)
    fresh = generate(engine_on_cpu(new, version=num_staged + 1), asked)
    return [{"staged": num_staged, **compare(generate(engine, asked), fresh, "after the last update")}]


def larger_model_in_bfloat16(setting: Setting) -> list[Row]:
    """Compare log-probabilities with those of transformers in float32, for the model computed in both dtypes."""
    model = random_model(setting, "smollm2_shape")
    plain = load_model(model.directory).to(setting.on)
    plain.set_attn_implementation("sdpa")  # type: ignore[operator]
    rows: list[Row] = []
    for dtype in (torch.bfloat16, torch.float32):
        weights = weights_of(load_model(model.directory, dtype))
        limits = EngineLimits(max_num_seqs=16, max_prompt_tokens=70, max_new_tokens=24, max_batched_tokens=256)
        runner = engine_model(load_config(model.directory), weights, max_length=limits.max_length, device=setting.on)
        asked = requests(16, model.vocab_size)
        completions = generate(Engine(runner, limits), asked)
        differences = torch.cat([_differences(plain, completions[each.rollout_id], each) for each in asked])
        mean, largest = float(differences.mean()), float(differences.max())
        rows.append({"dtype": str(runner.dtype), "mean_difference": mean, "largest_difference": largest})
        assert mean <= _BFLOAT16_MEAN, f"{runner.dtype}: log-probabilities differ by {mean:.3g} on average"
        assert runner.dtype is torch.bfloat16 or largest <= _FLOAT32_MAX, f"float32 differs by up to {largest:.3g}"
    return rows


@torch.no_grad()
def _differences(plain: Any, completion: Completion, request: Any) -> torch.Tensor:
    prompt, generated = torch.from_numpy(request.prompt_token_ids).long(), completion.generated
    tokens = torch.cat([prompt, torch.from_numpy(generated.token_ids).long()]).to(plain.device)
    logprobs = plain(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    expected = logprobs.gather(1, tokens[len(prompt) :, None]).squeeze(1).cpu()
    differences: torch.Tensor = (torch.from_numpy(generated.logprobs) - expected).abs()
    return differences
