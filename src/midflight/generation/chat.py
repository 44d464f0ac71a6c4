"""From a chat request to token ids: messages, tools and template arguments in the forms that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from midflight.generation.http_errors import ApiError
from midflight.generation.request_schemas import ChatMessage, ChatRequest, ToolCall
from midflight.models.text import encode_chat, reserved_arguments
from midflight.models.tokenizer import Tokenizer


class ChatEncoder:
    """Renders conversations with the tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._reserved = reserved_arguments(tokenizer)

    def encode(self, body: ChatRequest) -> list[int]:
        """Return the token ids of a conversation, up to the start of the model's answer.

        Raises: ApiError 400 if there is no chat template, or if the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise ApiError(400, "the model's tokenizer has no chat template; use /v1/completions")
        arguments = body.chat_template_kwargs or {}
        if reserved := self._reserved & arguments.keys():
            field = f"chat_template_kwargs.{min(reserved)}"
            raise ApiError(400, f"{field}: the server sets this argument; leave it out", param=field)
        messages = [_plain(message, f"messages.{index}") for index, message in enumerate(body.messages)]
        use_tools = body.tools and body.tool_choice != "none"
        tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()] if use_tools else None
        try:
            return encode_chat(self._tokenizer, messages, tools, template_arguments=arguments)
        except Exception as error:  # a template may raise any exception
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error


def _plain(message: ChatMessage, field: str) -> dict[str, Any]:
    """Convert a message to the form that most templates expect: its content is one string, without null fields."""
    content = message.content
    if content is None and message.role != "assistant":
        raise ApiError(400, f"{field}.content: null is for the assistant only; send a text", param=f"{field}.content")
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    plain: dict[str, Any] = {"role": message.role, "content": text}
    if message.tool_calls:
        plain["tool_calls"] = [
            _plain_call(call, f"{field}.tool_calls.{index}") for index, call in enumerate(message.tool_calls)
        ]
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    return plain | {name: value for name, value in optional.items() if value}


def _plain_call(call: ToolCall, field: str) -> dict[str, Any]:
    """Parse the arguments of a call: clients send them as text, and templates expect an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        field += ".function.arguments"
        raise ApiError(400, f"{field}: this is not the text of a JSON object", param=field)
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
