"""Requests as ordinary OpenAI clients send them: default fields, several texts, tools, template arguments."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from contract.conftest import Server

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }},{% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}={{ call.function.arguments.b }}{% endfor %}"
    "{{ message.tool_call_id or '' }}{% endfor %}{{ ending or ':' }}"
)
NEUTRAL: dict[str, Any] = {
    "n": 1, "top_p": 1, "stop": None, "stream": False, "presence_penalty": 0, "frequency_penalty": 0.0,
    "logit_bias": {}, "user": "someone",
}  # fmt: skip
NEUTRAL_COMPLETION: dict[str, Any] = {
    **NEUTRAL, "best_of": 1, "suffix": None, "logprobs": None, "echo": False,
    "extra_body": {"top_k": -1, "repetition_penalty": 1.0, "min_p": 0},
}  # fmt: skip
NEUTRAL_CHAT: dict[str, Any] = {
    **NEUTRAL, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "tools": [],
    "tool_choice": "auto", "parallel_tool_calls": True, "modalities": ["text"], "verbosity": "medium", "store": False,
    "metadata": {"run": "1"}, "service_tier": "auto", "prompt_cache_key": "a", "safety_identifier": "b",
    "extra_body": {"chat_template_kwargs": {}},
}  # fmt: skip
ADD = {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "a1"}


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Tokenizer whose template renders tools, calls, the variable `ending` and every content."""
    with_template = copy.deepcopy(tokenizer)
    with_template.chat_template = TEMPLATE
    return with_template


@pytest.fixture
def client(chat_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **body: Any) -> Any:
    return client.completions.create(model="tiny", **body)


def chat(client: openai.OpenAI, *messages: Any, **body: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, **body)


def rendered(client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast, *messages: Any, **body: Any) -> str:
    """Return the text of the prompt that the template makes of a conversation."""
    extra_body = {"return_token_ids": True, **body.pop("extra_body", {})}
    answer = chat(client, *messages, max_tokens=1, extra_body=extra_body, **body)
    return str(tokenizer.decode(answer.prompt_token_ids))


def test_neutral_values_change_nothing(client: openai.OpenAI) -> None:
    plain = complete(client, prompt="a1:", seed=3, max_tokens=6)
    assert complete(client, prompt="a1:", seed=3, max_tokens=6, **NEUTRAL_COMPLETION).choices == plain.choices
    plain = chat(client, QUESTION, seed=3, max_tokens=6)
    assert chat(client, QUESTION, seed=3, max_tokens=6, **NEUTRAL_CHAT).choices == plain.choices


COMMON = [
    ("presence_penalty", 0.5, "only 0 is supported, got 0.5"),
    ("frequency_penalty", -1, "only 0 is supported, got -1"),
    ("repetition_penalty", 1.1, "only 1 is supported, got 1.1"),
    ("logit_bias", {"5": -100}, "only an empty object or zeros are supported"),
]
COMPLETION = [
    ("best_of", 3, "only 1 is supported; n returns several choices"),
    ("suffix", "b", 'only "" is supported'),
    ("logprobs", 5, "only 0 or 1 is supported; the engine returns the log-probability of the sampled token only"),
]
CHAT = [
    ("top_logprobs", 5, "only 0 is supported; the engine returns the log-probability of the sampled token only"),
    ("response_format", {"type": "json_object"}, 'only {"type": "text"} is supported'),
    ("tool_choice", "required", 'only "auto" or "none" is supported'),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}, 'only "auto" or "none" is supported'),
    ("parallel_tool_calls", False, "only true is supported"),
    ("modalities", ["text", "audio"], 'only ["text"] is supported'),
    ("verbosity", "low", 'only "medium" is supported'),
]


@pytest.mark.parametrize(
    ("route", "field", "value", "message"),
    [("completions", *case) for case in COMMON + COMPLETION] + [("chat/completions", *case) for case in COMMON + CHAT],
)
def test_unsupported_value_is_refused_by_name(
    chat_server: Server, route: str, field: str, value: object, message: str
) -> None:
    body = {"prompt": "a1:"} if route == "completions" else {"messages": [QUESTION]}
    response = chat_server.http.post(f"/v1/{route}", json={**body, field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(f"{field}: {message}")
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", field, "unsupported_value")


def test_unknown_field_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="web_search_options: Extra inputs are not permitted") as raised:
        chat(client, QUESTION, extra_body={"web_search_options": {}})
    assert raised.value.param == "web_search_options"


def test_several_texts_are_answered_in_order(client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    """Choice `prompt_index * n + i` is sample i of a prompt, in one answer and in a stream."""
    texts = ["a1:", "b3+2:", "c4:"]
    options = {"n": 2, "max_tokens": 6}
    extra = {"rollout_id": 40, "return_token_ids": True}
    answer = complete(client, prompt=texts, seed=3, extra_body=extra, **options)
    assert answer.prompt_token_ids == [tokenizer.encode(text) for text in texts]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    for index, text in enumerate(texts):
        alone = complete(client, prompt=text, seed=3, extra_body={"rollout_id": 40 + 2 * index}, **options)
        assert [choice.text for choice in alone.choices] == [
            choice.text for choice in answer.choices[2 * index : 2 * index + 2]
        ]
    streamed = [""] * 6
    for chunk in complete(client, prompt=texts, seed=3, extra_body=extra, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]


def test_echo_returns_each_text_before_its_samples(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=["a 1:", "b2:"], n=2, max_tokens=3, echo=True, logprobs=1)
    starts = ["a 1:", "a 1:", "b2:", "b2:"]
    assert all(choice.text.startswith(start) for choice, start in zip(answer.choices, starts, strict=True))
    assert [choice.logprobs.token_logprobs[0] for choice in answer.choices] == [None] * 4


def test_wrong_list_of_prompts_is_refused(client: openai.OpenAI) -> None:
    for prompt, message in (
        (["a", 2], "prompt.0: Input should be a valid integer, got 'a'"),
        (["a", ""], "0 tokens, not 1 to 32"),
        (["a"] * 17, "17 prompts times n are 17, not 1 to 16"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            complete(client, prompt=prompt)
        assert message in raised.value.message


def test_model_is_found_by_id(client: openai.OpenAI) -> None:
    (listed,) = client.models.list()
    assert client.models.retrieve("tiny") == listed
    with pytest.raises(openai.NotFoundError, match=r"there is no model 'other/one', only 'tiny'") as raised:
        client.models.retrieve("other/one")
    assert raised.value.code == "model_not_found"


def test_tools_reach_the_chat_template(client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    assert rendered(client, tokenizer, QUESTION, tools=[ADD, ADD]) == "add,add,a1:"
    assert rendered(client, tokenizer, QUESTION, tools=[ADD], tool_choice="auto") == "add,a1:"
    assert rendered(client, tokenizer, QUESTION, tools=[ADD], tool_choice="none") == "a1:"


def test_template_arguments_reach_the_chat_template(client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    extra = {"chat_template_kwargs": {"ending": "+b="}}
    assert rendered(client, tokenizer, QUESTION, extra_body=extra) == "a1+b="
    assert rendered(client, tokenizer, QUESTION) == "a1:"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "messages", "tools"])
def test_request_cannot_replace_the_template(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"chat_template_kwargs.{name}: the server sets this argument"):
        chat(client, QUESTION, extra_body={"chat_template_kwargs": {name: "{{ 1 }}"}})


def test_conversation_with_tool_calls(client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"id": "d7", "type": "function", "function": {"name": "add", "arguments": '{"b": 2}'}}
    calling = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    answered = {"role": "tool", "content": "3", "tool_call_id": "d7"}
    assert rendered(client, tokenizer, QUESTION, calling, answered) == "a1add=23d7:"


def test_answer_can_be_sent_back(client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    message = chat(client, QUESTION, seed=1, max_tokens=4).choices[0].message
    text = f"a1{message.content}c:"
    follow_up = {"role": "user", "content": "c"}
    for earlier in (message, message.model_dump()):
        assert rendered(client, tokenizer, QUESTION, earlier, follow_up) == text


@pytest.mark.parametrize(
    ("message", "field", "reason"),
    [
        ({"role": "user", "content": None}, "messages.1.content", "null is for the assistant only; send a text"),
        ({"role": "user"}, "messages.1.content", "null is for the assistant only; send a text"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "b", "arguments": "[1]"}}]},
            "messages.1.tool_calls.0.function.arguments",
            "this is not the text of a JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "b", "arguments": "{"}}]},
            "messages.1.tool_calls.0.function.arguments",
            "this is not the text of a JSON object",
        ),
    ],
)
def test_wrong_message_is_refused_by_name(
    client: openai.OpenAI, message: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, QUESTION, message)
    assert raised.value.param == field
    assert f"{field}: {reason}" in raised.value.message


def test_strict_tool_is_refused_by_name(client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {"name": "add", "strict": True}}
    with pytest.raises(openai.BadRequestError, match="only false is supported") as raised:
        chat(client, QUESTION, tools=[strict])
    assert raised.value.param == "tools.0.function.strict"
