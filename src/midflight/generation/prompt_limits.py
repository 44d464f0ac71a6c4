"""Check of the length of texts before they are tokenized: tokenizing a body of megabytes takes seconds."""

from __future__ import annotations

import json

from midflight.generation.http_errors import ApiError
from midflight.generation.request_schemas import ChatMessage, ChatRequest
from midflight.models.tokenizer import Tokenizer

# Shortest bound on the characters of a token. Tokenizers may drop spaces, and may have one token for unknown words.
_LEAST_CHARACTERS = 16


class PromptLimit:
    """Largest number of characters of a prompt: no text that is longer fits into the context."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        """`max_length`: of prompt and response together (tokens)."""
        self._max_length = max_length
        self._max_characters = max_length * max(_LEAST_CHARACTERS, *map(len, tokenizer.get_vocab()))

    def check(self, field: str, num_characters: int) -> None:
        """Check the length of a text. Raises: ApiError 400 if it cannot fit."""
        if num_characters > self._max_characters:
            raise ApiError(
                400,
                f"{field} has {num_characters} characters, and {self._max_length} tokens have at most"
                f" {self._max_characters}",
                param=field,
                code="context_length_exceeded",
            )

    def check_chat(self, body: ChatRequest) -> None:
        """Check the length of a conversation: every message needs a token. Raises: ApiError 400 if it cannot fit."""
        if len(body.messages) > self._max_length:
            raise ApiError(
                400,
                f"messages: {len(body.messages)} messages do not fit into {self._max_length} tokens",
                param="messages",
                code="context_length_exceeded",
            )
        self.check("messages", sum(map(_num_characters, body.messages)))
        tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
        self.check("tools", len(json.dumps(tools, ensure_ascii=False)))
        self.check("chat_template_kwargs", len(json.dumps(body.chat_template_kwargs, ensure_ascii=False)))


def _num_characters(message: ChatMessage) -> int:
    content = message.content or ""
    text = len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
    return text + sum(len(call.function.arguments) for call in message.tool_calls or ())
