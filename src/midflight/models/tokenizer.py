"""The part of a Hugging Face tokenizer that midflight uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Converts text to token ids and back; Hugging Face tokenizers implement this protocol."""

    @property
    def bos_token(self) -> str | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def unk_token(self) -> str | None: ...

    @property
    def unk_token_id(self) -> int | None: ...

    @property
    def chat_template(self) -> object:
        """The model's chat template, or None."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. A special token in the text becomes one token for both values of `add_special_tokens`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **template_arguments: Any,
    ) -> Any:
        """Return the token ids of a conversation, or its text unless `tokenize`.

        Any exception is possible: a template can refuse a conversation.
        """
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the texts of all tokens; a text may stand for bytes, one character each."""
        ...

    def save_pretrained(self, save_directory: Path) -> object: ...
