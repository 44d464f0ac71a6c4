"""Prompts and turns as token ids: chat templates, system prompts, refusals and end-of-turn tokens."""

from __future__ import annotations

from typing import Any

import pytest

from chat_tokenizers import CHATML, END_OF_TURN, FAMILIES, chat_tokenizer
from midflight.errors import PromptError
from midflight.models.prompts import PromptFormat
from midflight.types import Message

QUESTION: list[Message] = [{"role": "user", "content": "ab!"}]
SYSTEM: Message = {"role": "system", "content": "Be brief."}


def rendered(tokenizer: Any, messages: list[Message], **arguments: Any) -> list[int]:
    """Return the token ids that the tokenizer's own method gives."""
    ids: list[int] = tokenizer.apply_chat_template(
        messages, **{"add_generation_prompt": True, "return_dict": False} | arguments
    )
    return ids


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_conversation_is_rendered_by_the_chat_template(family: str) -> None:
    tokenizer = chat_tokenizer(FAMILIES[family])
    assert PromptFormat(tokenizer).encode_prompt(QUESTION) == rendered(tokenizer, QUESTION)


def test_plain_text_is_sent_as_it_is() -> None:
    tokenizer = chat_tokenizer(CHATML)
    assert PromptFormat(tokenizer, system_prompt="Be brief.").encode_prompt("ab!") == tokenizer.encode("ab!")


def test_system_prompt_goes_before_conversations_without_one() -> None:
    tokenizer = chat_tokenizer(CHATML)
    prompts = PromptFormat(tokenizer, system_prompt="Be brief.")
    assert prompts.encode_prompt(QUESTION) == rendered(tokenizer, [SYSTEM, *QUESTION])
    own: Message = {"role": "system", "content": "Be long."}
    assert prompts.encode_prompt([own, *QUESTION]) == rendered(tokenizer, [own, *QUESTION])


def test_template_and_arguments_replace_the_tokenizers() -> None:
    tokenizer = chat_tokenizer(CHATML)
    template = "{% if shout %}!{% endif %}{{ messages[0].content }}"
    loud = PromptFormat(tokenizer, template=template, template_arguments={"shout": True})
    assert loud.encode_prompt(QUESTION) == tokenizer.encode("!ab!", add_special_tokens=False)
    assert PromptFormat(tokenizer, template=template).encode_prompt(QUESTION) == tokenizer.encode("ab!")


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt"])
def test_reserved_template_arguments_are_refused(name: str) -> None:
    with pytest.raises(PromptError, match=f"a template argument has the reserved name '{name}'"):
        PromptFormat(chat_tokenizer(CHATML), template_arguments={name: []})


def test_messages_without_a_template_are_refused() -> None:
    prompts = PromptFormat(chat_tokenizer(None))
    with pytest.raises(PromptError, match="a list of messages, but the tokenizer has no chat template"):
        prompts.encode_prompt(QUESTION)
    with pytest.raises(PromptError, match="has no chat template"):
        prompts.encode_turn(QUESTION, 0)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (FAMILIES["gemma"], [SYSTEM, *QUESTION], "refuses a prompt: System role not supported$"),
        ("{{ messages[0].content + 1 }}", QUESTION, r"refuses a prompt: can only concatenate str"),
        ("{% for", QUESTION, "refuses a prompt: "),
        (CHATML, [], "refuses a prompt: .*empty conversation"),
    ],
)
def test_refusal_of_a_template_has_its_reason(template: str, messages: list[Message], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        PromptFormat(chat_tokenizer(template)).encode_prompt(messages)


def test_check_syntax_names_the_line() -> None:
    PromptFormat(chat_tokenizer("{{ raise_exception('valid') }}")).check_syntax()
    with pytest.raises(PromptError, match=r"^line 2 is not valid Jinja: "):
        PromptFormat(chat_tokenizer("first\n{% for %}")).check_syntax()


def test_end_of_turn_token_follows_from_the_template(family: str) -> None:
    tokenizer = chat_tokenizer(FAMILIES[family])
    assert PromptFormat(tokenizer).end_of_turn == tokenizer.convert_tokens_to_ids(END_OF_TURN[family])


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for message in messages %}{{ message.content }} </s>{% endfor %}", "</s>"),
        ("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}", None),
        ("{% for message in messages %}{{ message.content }} over<|im_end|>{% endfor %}", None),
        ("{{ messages[0].content }}", None),
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_end_of_turn_token_is_special_and_comes_first(template: str | None, end: str | None) -> None:
    tokenizer = chat_tokenizer(template)
    assert PromptFormat(tokenizer).end_of_turn == (end and tokenizer.convert_tokens_to_ids(end))


def test_turn_of_plain_text_has_no_special_tokens() -> None:
    tokenizer = chat_tokenizer(CHATML)
    assert PromptFormat(tokenizer).encode_turn("ab!", 0) == tokenizer.encode("ab!", add_special_tokens=False)


def test_turn_after_another_ending_gets_the_end_of_turn_token() -> None:
    """A response that ended with a stop string or another end token has no end of turn yet."""
    tokenizer = chat_tokenizer(CHATML)
    prompts = PromptFormat(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    after_end = prompts.encode_turn(QUESTION, end)
    assert tokenizer.decode(after_end) == "\n<|im_start|>user\nab!<|im_end|>\n<|im_start|>assistant\n"
    assert prompts.encode_turn(QUESTION, tokenizer.eos_token_id) == [end, *after_end]


def test_template_without_answers_allows_no_turns() -> None:
    prompts = PromptFormat(chat_tokenizer("{{ messages[-1].content if messages[-1].role == 'user' }}"))
    with pytest.raises(PromptError, match="leaves out the model's answers"):
        prompts.encode_turn(QUESTION, 0)
