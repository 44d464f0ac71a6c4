"""Prompts as token ids: conversations through the chat template, plain text as it is.

A rollout is a row of token ids that only grows. A prompt is encoded once; the text of a later turn is encoded alone and
appended. Sampled tokens are never encoded again, because the same text can have other tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError

from midflight.errors import PromptError
from midflight.models.stopping import StopRules
from midflight.models.text import (
    decode,
    encode_chat,
    encode_text,
    is_special,
    render_chat,
    reserved_arguments,
    response_text,
)
from midflight.models.tokenizer import Tokenizer
from midflight.types import FinishReason, GeneratedTokens, Message, Text

# Stands for the model's last answer in a rendered conversation; templates copy a plain word unchanged.
_ANSWER = "MidflightAnswer"


class PromptFormat:
    """The rules of one task and one tokenizer, from text to token ids and back.

    `system_prompt`: system message of conversations that have none. `template`: replaces the tokenizer's chat template
    (Jinja); `template_arguments`: further variables of the template. `max_prompt_tokens`: None: no limit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        system_prompt: str | None = None,
        template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """Raises: PromptError if a template argument has a reserved name."""
        self.tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens
        self.stop_rules = StopRules(tokenizer)
        self._system_prompt, self._template = system_prompt, template
        self._arguments = dict(template_arguments or {})
        if reserved := reserved_arguments(tokenizer) & self._arguments.keys():
            raise PromptError(f"a template argument has the reserved name {min(reserved)!r}")

    @property
    def has_template(self) -> bool:
        """True if prompts may be messages."""
        return bool(self._template or self.tokenizer.chat_template)

    def encode_prompt(self, text: Text) -> list[int]:
        """Return the token ids of a prompt; of a conversation, up to the start of the model's answer.

        Raises: PromptError if there is no chat template, or if the template refuses the messages.
        """
        if isinstance(text, str):
            return encode_text(self.tokenizer, text)
        if self._system_prompt is not None and all(message["role"] != "system" for message in text):
            text = [{"role": "system", "content": self._system_prompt}, *text]
        self._check_template()
        try:
            return encode_chat(self.tokenizer, text, template=self._template, template_arguments=self._arguments)
        except Exception as error:  # a template may raise any exception
            raise _refusal(error) from error

    def encode_turn(self, text: Text, last_token: int) -> list[int]:
        """Return the token ids of an environment's text, to append to a response that ends with `last_token`.

        Messages begin with the text that the template writes after an answer. Its end-of-turn token is left out if the
        model has sampled this token already.
        Raises: PromptError as `encode_prompt`.
        """
        if isinstance(text, str):
            return self.tokenizer.encode(text, add_special_tokens=False)
        token_ids = self.tokenizer.encode(self._after_answer(text), add_special_tokens=False)
        end = self._end_of_turn_in(token_ids)
        return token_ids[end + 1 :] if end is not None and token_ids[end] == last_token else token_ids

    def check_syntax(self) -> None:
        """Check that the chat template is valid Jinja. Raises: PromptError."""
        try:
            render_chat(
                self.tokenizer,
                [{"role": "user", "content": "?"}],
                template=self._template,
                template_arguments=self._arguments,
                add_generation_prompt=True,
            )
        except TemplateSyntaxError as error:
            raise PromptError(f"line {error.lineno} is not valid Jinja: {error.message}") from error
        except Exception:  # a valid template may refuse this conversation
            return

    @functools.cached_property
    def end_of_turn(self) -> int | None:
        """The special token that the chat template writes right after an answer, or None."""
        try:
            token_ids = self.tokenizer.encode(self._after_answer(()), add_special_tokens=False)
        except PromptError:
            return None
        end = self._end_of_turn_in(token_ids)
        return None if end is None else token_ids[end]

    def until_stop(self, generated: GeneratedTokens, stop: tuple[str, ...]) -> GeneratedTokens | None:
        """Return the tokens up to the one that completes a stop string, or None if no stop string occurs."""
        end = self.stop_rules(stop).first_end(generated.token_ids) if stop else None
        return None if end is None else generated.part(0, end + 1)

    def response_text(
        self, generated: GeneratedTokens, finish_reason: FinishReason | None, stop: tuple[str, ...] = ()
    ) -> str:
        """Return the text of a complete response, as it is graded: without its end token, or up to its stop string."""
        if stop and finish_reason is FinishReason.STOP:
            rule = self.stop_rules(stop)
            if rule.ends(generated.token_ids):
                return rule.cut(decode(self.tokenizer, generated.token_ids.tolist()))
        return response_text(self.tokenizer, generated, finish_reason)

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """Text that the template writes after an answer of the model: the messages and the start of the next answer."""
        self._check_template()
        # The start of the conversation does not matter: only what follows the answer is used.
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, *messages]
        try:
            text = render_chat(
                self.tokenizer,
                conversation,
                template=self._template,
                template_arguments=self._arguments,
                add_generation_prompt=bool(messages),
            )
        except Exception as error:
            raise _refusal(error) from error
        _, found, after = text.rpartition(_ANSWER)
        if not found:
            raise PromptError("the chat template leaves out the model's answers, so no turn can follow them")
        return after

    def _end_of_turn_in(self, token_ids: Sequence[int]) -> int | None:
        """Position of the first special token if only white space precedes it."""
        for position, token_id in enumerate(token_ids):
            if is_special(self.tokenizer, token_id):
                return position
            if decode(self.tokenizer, [token_id]).strip():
                return None
        return None

    def _check_template(self) -> None:
        if not self.has_template:
            raise PromptError("the prompt is a list of messages, but the tokenizer has no chat template")


def _refusal(error: Exception) -> PromptError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return PromptError(f"the chat template refuses a prompt: {reason}")
