"""Model directories as their publishers lay them out, with random weights and tiny sizes.

Each `config.json` and `generation_config.json` has the keys of the published file, in the form of its time: it names
`torch_dtype`, `rope_scaling`, several end tokens, and a vocabulary larger than the tokenizer's. The tokenizers are
trained here on a few sentences, with the pre-tokenization, special tokens and kind of chat template of each family.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from midflight.models.loading import quiet
from narrowing import present

CORPUS = ["A tree grows by the river.", "Where is 7 + 12? It is 19.", "Grüße aus Köln, 東京 and Zürich 🙂."] * 4
VOCAB_SIZE = 400  # of the models; the tokenizers have fewer tokens, as published ones do
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 512}
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN3 = _CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Published:
    """One published model: its configuration, its tokenizer, and whether the fused decoder runs it."""

    config: dict[str, Any]
    special_tokens: tuple[str, ...]
    stop_tokens: tuple[str, ...]  # the tokenizer's EOS token, then the others in generation_config.json
    chat_template: str
    bos_token: str | None = None
    adds_bos: bool = False
    byte_fallback: bool = False  # SentencePiece's kind of BPE instead of the byte-level kind
    fused: bool = True
    generation: dict[str, Any] = field(default_factory=dict)


_QWEN: dict[str, Any] = {
    "special_tokens": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "stop_tokens": ("<|im_end|>", "<|endoftext|>"),
    "generation": {"do_sample": True, "repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
}
_QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_window_layers": 1,
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 128,
    "use_cache": True,
    "use_sliding_window": False,
}
_QWEN3_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
_LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 8,
    "hidden_act": "silu",
    "mlp_bias": False,
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
_LLAMA3_TOKENS: dict[str, Any] = {
    "special_tokens": (
        "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"
    ),
    "chat_template": _LLAMA3,
    "bos_token": "<|begin_of_text|>",
    "adds_bos": True,
}  # fmt: skip
_GEMMA_TOKENS: dict[str, Any] = {
    "special_tokens": ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    "stop_tokens": ("<eos>", "<end_of_turn>"),
    "chat_template": _GEMMA,
    "bos_token": "<bos>",
    "adds_bos": True,
    "byte_fallback": True,
    "fused": False,
    "generation": {"cache_implementation": "hybrid"},
}
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma2",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 8,
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 8,
    "sliding_window_pattern": 6,
}
_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "is_llama_config": True,
    "mlp_bias": False,
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
}
_SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 4,
    "max_window_layers": 4,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0],  # the fourth layer has no positions
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
}
_MISTRAL_CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "model_type": "mistral",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_MISTRAL_TOKENS: dict[str, Any] = {
    "special_tokens": ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
    "stop_tokens": ("</s>",),
    "chat_template": _MISTRAL,
    "bos_token": "<s>",
    "adds_bos": True,
    "byte_fallback": True,
}
PUBLISHED: dict[str, Published] = {
    "qwen2.5-0.5b": Published(_QWEN25 | {"tie_word_embeddings": True}, chat_template=_CHATML, **_QWEN),
    "qwen2.5-7b": Published(_QWEN25 | {"tie_word_embeddings": False}, chat_template=_CHATML, **_QWEN),
    "qwen3": Published(_QWEN3_CONFIG, chat_template=_QWEN3, **_QWEN),
    "llama3": Published(
        _LLAMA32 | {"rope_scaling": None, "tie_word_embeddings": False},
        stop_tokens=("<|eot_id|>", "<|end_of_text|>"),
        **_LLAMA3_TOKENS,
    ),
    "llama3.2": Published(_LLAMA32, stop_tokens=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), **_LLAMA3_TOKENS),
    "gemma2": Published(_GEMMA2, **_GEMMA_TOKENS),
    "gemma3": Published(_GEMMA3, **_GEMMA_TOKENS),
    "smollm2": Published(
        _SMOLLM2,
        special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"),
        stop_tokens=("<|im_end|>",),
        chat_template=_CHATML,
        bos_token="<|im_start|>",
    ),
    "smollm3": Published(
        _SMOLLM3,
        special_tokens=("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        stop_tokens=("<|im_end|>",),
        chat_template=_CHATML,
        fused=False,
    ),
    "mistral-0.1": Published(_MISTRAL_CONFIG | {"sliding_window": 8}, fused=False, **_MISTRAL_TOKENS),
    "mistral-0.3": Published(_MISTRAL_CONFIG, **_MISTRAL_TOKENS),
}


def write_published_model(name: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the directory of a published model; return the directory."""
    published = PUBLISHED[name]
    tokenizer = write_tokenizer(name, directory)
    ids = [present(tokenizer.token_to_id(token)) for token in published.stop_tokens]
    stop = ids[0] if len(ids) == 1 else sorted(ids)
    bos = tokenizer.token_to_id(published.bos_token or published.special_tokens[0])
    # Qwen names only the end of a turn in config.json.
    eos = ids[0] if name.startswith("qwen") else stop
    config = _SIZES | published.config | {"bos_token_id": bos, "eos_token_id": eos, "vocab_size": VOCAB_SIZE}
    _write(directory / "config.json", config | {"torch_dtype": str(dtype).removeprefix("torch."), "use_cache": True})
    _write(directory / "generation_config.json", published.generation | {"bos_token_id": bos, "eos_token_id": stop})
    _write_weights(directory, dtype)
    return directory


def write_tokenizer(name: str, directory: Path) -> Tokenizer:
    """Write the tokenizer of a published model and its chat template; return the tokenizer."""
    published = PUBLISHED[name]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_fallback_bpe(published) if published.byte_fallback else _byte_level_bpe(published)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": published.bos_token,
        "eos_token": published.stop_tokens[0],
        "chat_template": published.chat_template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write(directory / "tokenizer_config.json", config)
    return tokenizer


def _write_weights(directory: Path, dtype: torch.dtype) -> None:
    """Write random weights, norms and biases included, and leave the configuration as it is."""
    published = {file: file.read_text() for file in directory.glob("*config.json")}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name and "gemma" not in model.config.model_type else 0.0
            parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
    with quiet():
        model.to(dtype).save_pretrained(directory)
    for file, text in published.items():
        file.write_text(text)


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2))


def _byte_level_bpe(published: Published) -> Tokenizer:
    """Tokenizer of bytes, as in Qwen, Llama 3 and SmolLM: a character may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return _with_special_tokens(tokenizer, published)


def _byte_fallback_bpe(published: Published) -> Tokenizer:
    """Tokenizer of characters, as in Gemma and Mistral: a character without a token becomes tokens of its bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.normalizer = normalizers.Replace(" ", "▁")
    ascii_only = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    learned.train_from_iterator(
        ascii_only, trainers.BpeTrainer(vocab_size=80, special_tokens=[*published.special_tokens], show_progress=False)
    )
    model = json.loads(learned.to_str())["model"]
    names = [*sorted(model["vocab"], key=model["vocab"].get), *byte_tokens]
    tokenizer = Tokenizer(
        models.BPE(
            {token: token_id for token_id, token in enumerate(names)},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_special_tokens(tokenizer, published)


def _with_special_tokens(tokenizer: Tokenizer, published: Published) -> Tokenizer:
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in published.special_tokens]
    )
    if published.adds_bos and published.bos_token:
        bos = published.bos_token
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer
