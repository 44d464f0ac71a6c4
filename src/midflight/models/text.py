"""Text to tokens and back: the same rules for prompts and responses in training, evaluation and serving."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from midflight.models.tokenizer import Tokenizer
from midflight.types import FinishReason, GeneratedTokens


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt of plain text, with the special tokens that the tokenizer adds.

    A text that begins with BOS, such as a rendered chat template, gets no special tokens: BOS must not occur twice.
    """
    bos = tokenizer.bos_token
    return tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos)))


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, up to the start of the model's answer; the chat template adds the special tokens.

    `tools`: descriptions of functions; `template`: replaces the tokenizer's template; `template_arguments`: further
    variables of the template. Any exception is possible, because a template can refuse a conversation.
    """
    token_ids: list[int] = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **template_arguments or {},
    )
    return token_ids


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    template: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool,
) -> str:
    """Text of a conversation with its special tokens. Any exception is possible."""
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=None,
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        return_dict=False,
        **template_arguments or {},
    )
    return text


def reserved_arguments(tokenizer: Tokenizer) -> set[str]:
    """Names that a template's further variables must not have: they would replace the template or its input."""
    return {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Text of generated tokens, without special tokens."""
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def is_special(tokenizer: Tokenizer, token_id: int) -> bool:
    """True if the token has a text that `decode` leaves out."""
    return not decode(tokenizer, [token_id]) and bool(tokenizer.decode([token_id]))


def without_stop_token(token_ids: list[int], finish_reason: FinishReason | None) -> list[int]:
    """Remove the token that ended the response, which need not be a special token."""
    return token_ids[:-1] if finish_reason is FinishReason.STOP else token_ids


def response_text(tokenizer: Tokenizer, generated: GeneratedTokens, finish_reason: FinishReason | None) -> str:
    """Text of a complete response, as it is graded, evaluated and served."""
    token_ids: list[int] = generated.token_ids.tolist()
    return decode(tokenizer, without_stop_token(token_ids, finish_reason))
