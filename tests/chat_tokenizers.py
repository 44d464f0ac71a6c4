"""Tiny tokenizers with chat templates of the common families: one token per byte, a few merges, special tokens."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Each ends a turn with its own special token, and writes something after it or nothing.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
FAMILIES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA}
END_OF_TURN = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
_BOS, _EOS = "<s>", "</s>"
_SPECIAL = [
    _BOS, _EOS, "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip
# Ċ is the byte-level letter of a line break, Ġ of a space.
_MERGES = [("Ċ", "Ċ"), ("a", "b"), ("ab", "Ċ"), ("Ġ", "a"), ("!", "Ċ"), ("E", "N"), ("EN", "D")]


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with this chat template; it knows the special tokens of all families."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in _MERGES)]
    core = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, _MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=_BOS, eos_token=_EOS, extra_special_tokens=_SPECIAL[2:]
    )
    tokenizer.chat_template = template
    return tokenizer
