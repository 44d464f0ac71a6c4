"""Text to tokens and back: the same rules for prompts and responses in training, evaluation and serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from midflight.protocols import Tokenizer
from midflight.types import FinishReason, GeneratedTokens, Text


def joined(text: Text) -> str:
    """Text of messages, concatenated without their roles."""
    return text if isinstance(text, str) else "".join(message["content"] for message in text)


def encode_turn(tokenizer: Tokenizer, text: Text) -> list[int]:
    """Token ids of an environment's text after a response, to append to the tokens so far."""
    return tokenizer.encode(joined(text), add_special_tokens=False)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt, with the special tokens that the tokenizer adds.

    A text that begins with BOS, such as a rendered chat template, gets no special tokens: BOS must not occur twice.
    """
    bos = tokenizer.bos_token
    return tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos)))


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, up to the start of the model's answer; the chat template adds the special tokens.

    `tools`: descriptions of functions; `template_arguments`: further variables of the template.
    """
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False, **template_arguments or {}
    )


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Text of generated tokens, without special tokens."""
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def without_stop_token(token_ids: list[int], finish_reason: FinishReason | None) -> list[int]:
    """Remove the token that ended the response, which need not be a special token."""
    return token_ids[:-1] if finish_reason is FinishReason.STOP else token_ids


def response_text(tokenizer: Tokenizer, generated: GeneratedTokens, finish_reason: FinishReason | None) -> str:
    """Text of a complete response, as it is graded, evaluated and served."""
    token_ids: list[int] = generated.token_ids.tolist()
    return decode(tokenizer, without_stop_token(token_ids, finish_reason))
