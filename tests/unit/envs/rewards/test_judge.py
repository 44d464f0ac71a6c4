"""The reward by a language model: prompts, scores, retries and refusals, with a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from midflight.config.tasks import RewardTerm
from midflight.envs.rewards import judge as judge_module
from midflight.envs.rewards.judge import Judge
from midflight.envs.rewards.terms import RewardError, Rewards
from midflight.errors import RecipeError
from midflight.launch.rewards import build_rewards
from midflight.types import Problem

PROBLEM = Problem("set/1", [{"role": "user", "content": "2 + 2?"}], answer="4")


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server with prepared answers: (status, text of the reply or body) in order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[tuple[int, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models_status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._answer(self.server.models_status, {"data": []})

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.keys.append(self.headers["authorization"])
        status, answer = self.server.answers.pop(0)
        if isinstance(answer, str):
            answer = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
        self._answer(status, answer)

    def _answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "_FIRST_PAUSE_S", 0.0)


MakeJudge = Callable[..., Rewards]


@pytest.fixture
def judge() -> Iterator[MakeJudge]:
    """Makes rewards with a judge alone, and closes their event loops while no other loop runs."""
    made = []

    def make(url: str, **options: Any) -> Rewards:
        made.append(build_rewards([RewardTerm(type="judge", options={"url": url, "model": "m", **options})]))
        return made[-1]

    yield make
    for rewards in made:
        rewards._event_loop().close()


@pytest.mark.parametrize(
    ("reply", "options", "reward"),
    [
        ("Good.\nScore: 7", {}, 0.7),
        ("Score: 3? No.\nScore: 10", {}, 1.0),
        ("Score: 25", {}, 1.0),
        ("Score: -1", {}, 0.0),
        ("[[2]] of 4", {"score_pattern": r"\[\[(\d)\]\]", "max_score": 4}, 0.5),
    ],
)
def test_last_score_is_the_reward(
    judge: MakeJudge, server: Server, reply: str, options: dict[str, Any], reward: float
) -> None:
    server.answers = [(200, reply)]
    grade = judge(server.url, **options).grade(PROBLEM, "It is 4.")
    assert grade.reward == pytest.approx(reward)
    assert grade.components == {"judge": pytest.approx(reward)}


def test_request_has_the_filled_prompt_and_the_options(
    judge: MakeJudge, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.answers = [(200, "Score: 1")]
    prompt = "Q {question} A {answer} R {response} {other}"
    rewards = judge(server.url + "/", prompt=prompt, api_key_variable="JUDGE_KEY", max_tokens=5, temperature=0.5)
    rewards.grade(PROBLEM, "{answer}")
    assert server.requests == [
        {
            "model": "m",
            "max_tokens": 5,
            "temperature": 0.5,
            "messages": [{"role": "user", "content": "Q 2 + 2? A 4 R {answer} {other}"}],
        }
    ]
    assert server.keys == ["Bearer secret"]


def test_busy_server_is_asked_again(judge: MakeJudge, server: Server) -> None:
    server.answers = [(429, {}), (503, {}), (200, "Score: 10")]
    assert judge(server.url).grade(PROBLEM, "4").reward == 1.0


@pytest.mark.parametrize(
    ("answers", "options", "message"),
    [
        ([(503, {"error": "down"})] * 3, {"retries": 2}, r'answered 503: \{"error": "down"\}'),
        ([(404, {"error": "no model m"})], {}, r'answered 404: \{"error": "no model m"\}'),
        ([(200, "I refuse.")], {}, r"no match of .*: 'I refuse.'"),
        ([(200, "Score: ten")], {"score_pattern": r"Score: (\w+)"}, "score 'ten' is not a number"),
        ([(200, {"choices": []})], {}, "not a chat completion"),
        ([(200, {"choices": [{"message": {"content": None}}]})], {}, "no match of"),
    ],
)
def test_judge_without_a_score_fails_the_rollout(
    judge: MakeJudge, server: Server, answers: list[tuple[int, Any]], options: dict[str, Any], message: str
) -> None:
    server.answers = list(answers)
    with pytest.raises(RewardError, match=rf"^judge, problem 'set/1': .*{message}"):
        judge(server.url, **options).grade(PROBLEM, "4")
    assert server.answers == []


def test_late_judge_fails_the_rollout(judge: MakeJudge, server: Server) -> None:
    server.answers = [(429, {})]
    with pytest.raises(RewardError, match=r"answered 429|took longer than timeout_s = 0\.0001"):
        judge(server.url, timeout_s=0.0001).grade(PROBLEM, "4")


def test_unreachable_judge_fails_the_rollout_and_the_check(judge: MakeJudge, server: Server) -> None:
    unused = "http://127.0.0.1:1/v1"
    with pytest.raises(RewardError, match="cannot be reached: All connection attempts failed"):
        judge(unused, retries=1).grade(PROBLEM, "4")
    with pytest.raises(RecipeError, match=r"cannot reach http://127\.0\.0\.1:1/v1: .*Connection refused; start"):
        judge(unused).check(PROBLEM)
    judge(server.url).check(PROBLEM)


@pytest.mark.parametrize(("status", "accepted"), [(401, False), (403, False), (404, True), (500, True)])
def test_check_refuses_a_wrong_key_only(judge: MakeJudge, server: Server, status: int, accepted: bool) -> None:
    server.models_status = status
    if accepted:
        judge(server.url).check(PROBLEM)
    else:
        with pytest.raises(RecipeError, match=f"refuses the API key .status {status}.; set api_key_variable"):
            judge(server.url).check(PROBLEM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "url = '127.0.0.1:8000' is not a URL"),
        ({"prompt": "{question}"}, "no place for the response"),
        ({"score_pattern": "("}, "score_pattern = '\\(' is not a regular expression"),
        ({"score_pattern": "Score"}, "has no group"),
        ({"max_score": 0}, "max_score = 0 is not positive"),
        ({"api_key_variable": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE, which api_key_variable names, is not set"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Judge(**{"url": "http://127.0.0.1:1", "model": "m", **options})
