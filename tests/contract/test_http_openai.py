"""OpenAI-compatible routes of the server, called through the official client where possible."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from midflight.models.text import response_text
from midflight.testing.fakes import ScriptedGenerator
from midflight.testing.tiny_models import tiny_engine, tiny_model
from midflight.types import Completion, FinishReason, GeneratedTokens, GenerationRequest, RolloutId, SamplingParams
from narrowing import instance, present

if TYPE_CHECKING:
    from contract.conftest import Server, StartServer


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def chatty(start_server: StartServer, chat_tokenizer: PreTrainedTokenizerFast) -> Iterator[openai.OpenAI]:
    """Client of a server whose tokenizer has a chat template."""
    server = start_server(served_tokenizer=chat_tokenizer)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **body: Any) -> Any:
    """Ask for completions through the official client; answers have fields that its types lack."""
    return client.completions.create(**body)


def chat(client: openai.OpenAI, **body: Any) -> Any:
    """Ask for a chat completion, as `complete` does."""
    return client.chat.completions.create(**body)


def in_process(prompt: list[int], sampling: SamplingParams, seed: int, rollout_ids: range) -> list[Completion]:
    engine = tiny_engine(tiny_model())
    prompt_token_ids = np.array(prompt, np.int32)
    engine.add([GenerationRequest(RolloutId(each), prompt_token_ids, sampling, seed) for each in rollout_ids])
    completions = []
    while engine.num_in_flight:
        completions += engine.step()
    return sorted(completions, key=lambda completion: completion.rollout_id)


def test_every_stop_token_of_the_model_ends_a_response(client: openai.OpenAI, start_server: StartServer) -> None:
    asked = {"model": "tiny", "prompt": "a1:", "seed": 2, "extra_body": {"return_token_ids": True}}
    (whole,) = complete(client, **asked).choices
    last = whole.token_ids[4]
    server = start_server(stop_token_ids=(2, last))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as other_client:
        (choice,) = complete(other_client, **asked).choices
    end = whole.token_ids.index(last) + 1
    assert (choice.token_ids, choice.finish_reason) == (whole.token_ids[:end], "stop")


def test_served_text_matches_graded_text(client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    answer = complete(client, model="tiny", prompt="a1:", n=8, seed=2, extra_body={"return_token_ids": True})
    assert any(set(choice.token_ids[:-1]) & set(tokenizer.all_special_ids) for choice in answer.choices)
    for choice in answer.choices:
        no_logprobs = np.zeros(len(choice.token_ids), np.float32)
        generated = GeneratedTokens(np.array(choice.token_ids, np.int32), no_logprobs, no_logprobs.astype(np.int32))
        assert choice.text == response_text(tokenizer, generated, FinishReason(choice.finish_reason))


def test_completions_match_the_engine(client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    answer = complete(
        client,
        model="tiny",
        prompt=[5, 6, 7],
        n=3,
        max_tokens=20,
        temperature=0.8,
        seed=3,
        logprobs=0,
        extra_body={"return_token_ids": True, "rollout_id": 40, "stop_token_ids": [9]},
    )
    assert answer.prompt_token_ids == [5, 6, 7]
    num_tokens = 0
    completions = in_process([5, 6, 7], SamplingParams(20, 0.8, (9,)), seed=3, rollout_ids=range(40, 43))
    for index, (choice, expected) in enumerate(zip(answer.choices, completions, strict=True)):
        assert choice.index == index
        assert choice.token_ids == expected.generated.token_ids.tolist()
        assert choice.weight_versions == [0] * len(choice.token_ids)
        assert choice.finish_reason == expected.finish_reason.value
        assert np.float32(choice.logprobs.token_logprobs).tolist() == expected.generated.logprobs.tolist()
        text_ids = choice.token_ids[: -1 if choice.finish_reason == "stop" else None]
        assert choice.text == tokenizer.decode(text_ids, skip_special_tokens=True)
        num_tokens += len(choice.token_ids)
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.total_tokens == num_tokens + 3


def test_streamed_chunks_join_to_the_whole_completion(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": "a1:", "n": 2, "max_tokens": 12, "seed": 5, "logprobs": 0}
    extra = {"return_token_ids": True}
    whole = complete(client, **options, extra_body=extra)
    chunks = list(complete(client, **options, extra_body=extra, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    for choice in whole.choices:
        pieces = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert len(pieces) == 12, "one token per chunk"
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [token for piece in pieces for token in piece.token_ids] == choice.token_ids
        logprobs = [value for piece in pieces for value in piece.logprobs.token_logprobs]
        # The prompt is in the prefix cache now; another batch composition rounds differently.
        np.testing.assert_allclose(logprobs, choice.logprobs.token_logprobs, atol=1e-5)
        assert [piece.finish_reason for piece in pieces] == [None] * 11 + [choice.finish_reason]


def test_chunk_size_is_configurable(client: openai.OpenAI) -> None:
    chunks = list(
        complete(
            client,
            model="tiny",
            prompt=[4],
            max_tokens=10,
            stream=True,
            extra_body={"stream_options": {"chunk_tokens": 4}, "return_token_ids": True, "stop_token_ids": []},
        )
    )
    assert [len(chunk.choices[0].token_ids) for chunk in chunks] == [4, 4, 2]


def test_chat_completions(chatty: openai.OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    options = {"model": "tiny", "messages": [{"role": "user", "content": "a1"}], "max_tokens": 9, "seed": 1}
    whole = chat(chatty, **options, logprobs=True, extra_body={"return_token_ids": True})
    assert whole.prompt_token_ids == tokenizer.encode("a1:")
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == len(choice.token_ids) == len(choice.weight_versions)
    chunks = list(chat(chatty, **options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    parts = [{"role": "user", "content": [{"type": "text", "text": "a1"}]}]
    again = chat(
        chatty, model="tiny", messages=parts, max_completion_tokens=9, seed=1, extra_body={"return_token_ids": True}
    )
    assert again.choices[0].message.content == choice.message.content


def test_a_seed_makes_requests_repeatable(client: openai.OpenAI) -> None:
    """A request with the seed of one in flight waits for it."""
    texts: dict[int, str] = {}

    def ask(index: int) -> None:
        texts[index] = complete(client, model="tiny", prompt="a1:", seed=7).choices[0].text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert len(set(texts.values())) == 1
    assert complete(client, model="tiny", prompt="a1:", seed=8).choices[0].text != texts[0]


def test_a_stop_string_ends_the_text_and_frees_the_slot(server: Server, client: openai.OpenAI) -> None:
    whole = complete(
        client, model="tiny", prompt="a1:", seed=2, extra_body={"return_token_ids": True, "stop_token_ids": []}
    ).choices[0]
    stop = whole.text[5:7]
    at = whole.text.find(stop)
    for stream in (False, True):
        answer = complete(client, model="tiny", prompt="a1:", seed=2, stop=["never", stop], stream=stream,
            extra_body={"return_token_ids": True, "stop_token_ids": []},
        )  # fmt: skip
        choices = [each for chunk in answer for each in chunk.choices] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == whole.text[:at]
        assert choices[-1].finish_reason == "stop"
        token_ids = [token_id for choice in choices for token_id in choice.token_ids]
        assert token_ids == whole.token_ids[: len(token_ids)]
        assert len(token_ids) < len(whole.token_ids)
    server.driver.abort([]).result()
    assert server.driver.num_in_flight == 0


def test_a_resumed_completion_matches_the_uninterrupted_one(server: Server) -> None:
    body = {
        "prompt": [3, 4], "max_tokens": 20, "seed": 1, "rollout_id": 6, "logprobs": 0, "return_token_ids": True,
        "stop_token_ids": [],
    }  # fmt: skip
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]
    first = server.http.post("/v1/completions", json={**body, "max_tokens": 7}).json()["choices"][0]
    generated = {
        "token_ids": first["token_ids"],
        "logprobs": first["logprobs"]["token_logprobs"],
        "weight_versions": first["weight_versions"],
    }
    resumed = server.http.post("/v1/completions", json={**body, "generated": generated}).json()["choices"][0]
    assert resumed["token_ids"] == whole["token_ids"]
    assert resumed["text"] == whole["text"]
    np.testing.assert_allclose(
        resumed["logprobs"]["token_logprobs"], whole["logprobs"]["token_logprobs"], rtol=0, atol=1e-5
    )


def test_models_lists_the_limits(client: openai.OpenAI) -> None:
    models: Any = client.models.list()
    (model,) = models
    assert (model.id, model.vocab_size, model.max_length, model.max_choices) == ("tiny", 44, 56, 16)


def test_each_prompt_is_a_separate_request(client: openai.OpenAI) -> None:
    """Choices are ordered by prompt; the samples of a prompt are adjacent."""
    options = {"model": "tiny", "max_tokens": 6, "seed": 3}
    answer = complete(
        client, prompt=[[5, 6], [7]], n=2, extra_body={"return_token_ids": True, "rollout_id": 40}, **options
    )
    assert answer.prompt_token_ids == [[5, 6], [7]]
    assert answer.usage.prompt_tokens == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for prompt, first in (([5, 6], 0), ([7], 2)):
        alone = complete(
            client, prompt=prompt, n=2, extra_body={"return_token_ids": True, "rollout_id": 40 + first}, **options
        )
        assert [each.token_ids for each in alone.choices] == [
            each.token_ids for each in answer.choices[first : first + 2]
        ]


def scored_in_process(prompt: list[int], temperature: float = 1.0) -> list[float]:
    engine = tiny_engine(tiny_model())
    sampling = SamplingParams(0, temperature)
    engine.add([GenerationRequest(RolloutId(0), np.array(prompt, np.int32), sampling, 0, score_prompt=True)])
    while not (completions := engine.step()):
        pass
    logprobs: list[float] = present(completions[0].prompt).logprobs.tolist()
    return logprobs


def test_echo_scores_prompts(client: openai.OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    """Scored prompts may be as long as a prompt and a response together."""
    prompts = [[5, 6, 7], [9], [2 + position % 40 for position in range(56)]]
    answer = complete(client, model="tiny", prompt=prompts, echo=True, max_tokens=0, logprobs=1, temperature=0.8,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert answer.usage.prompt_tokens == 60
    assert answer.usage.completion_tokens == 0
    for index, (prompt, choice) in enumerate(zip(prompts, answer.choices, strict=True)):
        assert choice.index == index
        assert choice.finish_reason == "length"
        assert choice.token_ids == prompt
        assert choice.weight_versions == [0] * len(prompt)
        assert choice.logprobs.tokens == [tokenizer.decode([token_id]) for token_id in prompt]
        assert choice.logprobs.token_logprobs[0] is None
        expected = scored_in_process(prompt, 0.8)[1:]
        np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], expected, atol=1e-5)
        assert choice.text == tokenizer.decode(prompt, skip_special_tokens=True)


def test_echo_puts_the_prompt_before_the_response(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": "a1+2:", "n": 2, "max_tokens": 9, "seed": 5, "logprobs": 1}
    extra = {"return_token_ids": True}
    plain = complete(client, **options, extra_body=extra)
    echoed = complete(client, **options, extra_body=extra, echo=True)
    num_prompt = len(plain.prompt_token_ids)
    assert echoed.usage == plain.usage
    for with_prompt, without in zip(echoed.choices, plain.choices, strict=True):
        assert with_prompt.text == "a1+2:" + without.text
        assert with_prompt.token_ids == plain.prompt_token_ids + without.token_ids
        assert with_prompt.weight_versions == [0] * len(with_prompt.token_ids)
        logprobs = with_prompt.logprobs.token_logprobs
        np.testing.assert_allclose(logprobs[num_prompt:], without.logprobs.token_logprobs, atol=1e-5)
        expected = scored_in_process(plain.prompt_token_ids)[1:]
        np.testing.assert_allclose(logprobs[1:num_prompt], expected, atol=1e-5)


def test_an_aborted_echo_returns_no_prompt(start_server: StartServer) -> None:
    server = start_server()
    server.http.post("/pause")
    answers: list[httpx.Response] = []
    body = {"prompt": [5, 6], "echo": True, "max_tokens": 0, "rollout_id": 3, "logprobs": 1, "return_token_ids": True}
    asking = threading.Thread(target=lambda: answers.append(server.http.post("/v1/completions", json=body)))
    asking.start()
    while not server.driver.num_in_flight:
        pass
    server.http.post("/abort", json={"rollout_ids": [3]})
    asking.join()
    (choice,) = answers[0].json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"] == choice["logprobs"]["token_logprobs"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stream": True}, "stream: not with echo; its answer comes whole"),
        ({"stop": ["a"]}, "stop: not with echo"),
        ({"top_k": 3}, "top_k: not with echo"),
        ({"top_p": 0.5}, "top_p: not with echo"),
        ({"min_p": 0.5}, "min_p: not with echo"),
        ({"generated": {"token_ids": [1], "logprobs": [0.0], "weight_versions": [0]}}, "generated: not with echo"),
        ({"prompt": [2] * 57}, "57 tokens, not 1 to 56"),
        ({"prompt": [2] * 33, "max_tokens": 1}, "33 tokens, not 1 to 32"),
        ({"prompt": []}, "0 tokens, not 1 to 56"),
        ({"echo": "yes"}, "echo: "),
    ],
)
def test_echo_refuses_other_options(server: Server, change: dict[str, object], message: str) -> None:
    body = {"prompt": [2, 3], "echo": True, "max_tokens": 0, **change}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"prompt": []}, 400, "0 tokens, not 1 to 32"),
        ({"prompt": ""}, 400, "0 tokens, not 1 to 32"),
        ({"prompt": [2] * 33}, 400, "33 tokens, not 1 to 32"),
        ({"prompt": "a" * 33}, 400, "33 tokens, not 1 to 32"),
        ({"prompt": [2, 44]}, 400, "token id 44 is not in 0 to 43"),
        ({"prompt": [-1]}, 400, "prompt.0: Input should be greater than or equal to 0, got -1"),
        ({"prompt": 5}, 400, "prompt: "),
        ({"prompt": [[1], 2]}, 400, "prompt."),
        ({"prompt": [[1], [-2]]}, 400, "prompt.1.0: Input should be greater than or equal to 0, got -2"),
        ({"prompt": [[1], []]}, 400, "0 tokens, not 1 to 32"),
        ({"prompt": [[1], [44]]}, 400, "token id 44 is not in 0 to 43"),
        ({"prompt": [[1]] * 6, "n": 3}, 400, "6 prompts times n are 18, not 1 to 16"),
        (
            {"prompt": [[1], [2]], "generated": {"token_ids": [1], "logprobs": [0.0], "weight_versions": [0]}},
            400,
            "prompt is 2, but only one sample",
        ),
        ({"stop_token_ids": [2, 99]}, 400, "token id 99 is not in 0 to 43"),
        ({"stop_token_ids": list(range(9))}, 400, "9 stop tokens"),
        ({"temperature": -0.5}, 400, "temperature: Input should be greater than or equal to 0, got -0.5"),
        ({"temperature": "warm"}, 400, "temperature: "),
        ({"temperature": 1e308}, 400, "temperature: "),
        ({"temperature": 1e-40}, 400, "temperature is 1e-40, not 0 or 0.001 to 100"),
        ({"generated": {"token_ids": [1], "logprobs": [-1e300], "weight_versions": [0]}}, 400, "generated.logprobs.0"),
        ({"top_p": 0}, 400, "top_p: "),
        ({"n": 0}, 400, "n: Input should be greater than or equal to 1, got 0"),
        ({"n": 17}, 400, "n is 17, not 1 to 16"),
        ({"max_tokens": 25}, 400, "max_tokens is 25, not 1 to 24"),
        ({"max_tokens": 0}, 400, "max_tokens: 0 needs echo"),
        ({"max_tokens": -1}, 400, "max_tokens: "),
        ({"stop": ""}, 400, "empty string"),
        ({"logprobs": 2}, 400, "logprobs: "),
        ({"best_of": 2}, 400, "best_of: only 1 is supported"),
        ({"model": "gpt"}, 404, "there is no model 'gpt', only 'tiny'"),
        ({"rollout_id": (1 << 52) - 1, "n": 2}, 400, "rollout_id + n is above"),
        ({"generated": {"token_ids": [1], "logprobs": [], "weight_versions": [0]}}, 400, "1 token_ids but 0 logprobs"),
        ({"generated": {"token_ids": [44], "logprobs": [0.0], "weight_versions": [0]}}, 400, "token id 44"),
        ({"generated": {"token_ids": [], "logprobs": [], "weight_versions": []}, "n": 2}, 400, "n is 2"),
        (
            {"generated": {"token_ids": [1] * 9, "logprobs": [0.0] * 9, "weight_versions": [0] * 9}, "max_tokens": 9},
            400,
            "already has 9 of 9",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_names_field_and_value(
    server: Server, change: dict[str, object], status: int, message: str, stream: bool
) -> None:
    response = server.http.post("/v1/completions", json={"prompt": [2, 3], **change, "stream": stream})
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert server.http.post("/v1/completions", json={"prompt": [2]}).status_code == 200


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="33 tokens"):
        complete(client, model="tiny", prompt=[2] * 33)
    with pytest.raises(openai.NotFoundError, match="no model"):
        complete(client, model="other", prompt=[2])
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        chat(client, model="tiny", messages=[{"role": "user", "content": "a"}])


def test_a_chat_template_error_is_a_bad_request(chatty: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="only users may speak"):
        chat(chatty, model="tiny", messages=[{"role": "system", "content": "a"}])


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"NaN",
        b"3",
        rb'{"prompt": "\ud800"}',
        rb'{"prompt": "a", "\ud800": 1}',
        rb'{"prompt": "a", "stop": "\ud800", "n": 0}',
    ],
)
def test_an_unreadable_body_is_a_bad_request(server: Server, content: bytes) -> None:
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_large_body_is_refused(start_server: StartServer) -> None:
    server = start_server(max_body_bytes=1000)
    ten_megabytes = json.dumps({"prompt": "a" * 10_000_000}).encode()
    headers = {"Content-Type": "application/json"}
    unknown_length = (b" " * 1000 for _ in range(100))
    for content in (ten_megabytes, unknown_length):
        response = server.http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]
    assert server.http.post("/v1/completions", json={"prompt": [2]}).status_code == 200


def test_a_large_body_is_not_read_to_its_end(start_server: StartServer) -> None:
    app = start_server(max_body_bytes=1000).app
    num_received = 0
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, object]:
        nonlocal num_received
        num_received += 1
        return {"type": "http.request", "body": b" " * 400, "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1",
        "headers": [(b"content-type", b"application/json")], "scheme": "http", "server": ("127.0.0.1", 80),
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 413
    assert num_received == 3


def test_unknown_routes_and_methods_return_openai_errors(server: Server) -> None:
    for response in (server.http.get("/nothing"), server.http.get("/v1/completions")):
        assert response.json()["error"]["message"]
    assert response.status_code == 405
    assert response.headers["Allow"] == "POST"


def test_a_disconnected_client_frees_its_slots(start_server: StartServer) -> None:
    """Paused requests of disconnected clients fill all eight slots; the ninth request is still served."""
    server = start_server()
    server.http.post("/pause")
    body = {"prompt": [2], "stop_token_ids": []}
    with httpx.Client(base_url=server.url) as leaving:
        streams = [leaving.stream("POST", "/v1/completions", json={**body, "n": 4, "stream": True}) for _ in range(2)]
        for stream in streams:
            stream.__enter__()
        assert server.driver.num_in_flight == 8
        for stream in streams:
            stream.__exit__(None, None, None)
    impatient = httpx.Timeout(60, read=0.2)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=body, timeout=impatient)
    server.http.post("/resume")
    assert server.http.post("/v1/completions", json=body).status_code == 200
    wait_until_idle(server)
    assert server.metric("requests_aborted_total") == 9
    assert server.metric("requests_finished_total") == 1


def wait_until_idle(server: Server) -> None:
    """Wait until no request is in flight. Commands run between two steps, so this polls once per step."""
    for _ in range(100_000):
        server.driver.abort([]).result()
        if server.driver.num_in_flight == 0:
            return
    pytest.fail("slots were not freed")


class BrokenGenerator(ScriptedGenerator):
    """Generator whose third step fails."""

    def __init__(self) -> None:
        super().__init__(lambda rollout_id: 10)
        self._num_steps = 0

    def step(self) -> list[Completion]:
        self._num_steps += 1
        if self._num_steps == 3:
            raise RuntimeError("out of memory")
        return super().step()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_step_fails_the_requests_in_flight(start_server: StartServer, stream: bool) -> None:
    server = start_server(BrokenGenerator())
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="generation failed: RuntimeError: out of memory") as raised:
            list(complete(client, model="tiny", prompt=[1], stream=stream))
        if not stream:
            assert instance(raised.value, openai.APIStatusError).status_code == 500
        health = server.http.get("/health")
        assert health.status_code == 503
        assert "out of memory" in health.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            complete(client, model="tiny", prompt=[1])
    assert server.metric("failed") == 1
    assert server.http.post("/pause").status_code == 500
