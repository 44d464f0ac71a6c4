"""Score of a response by a language model behind an OpenAI-compatible URL."""

from __future__ import annotations

import asyncio
import os
import re
import time
from typing import Any

import httpx

from midflight.envs.patterns import compiled, last_match
from midflight.errors import RecipeError
from midflight.types import Grade, Problem

PROMPT = """Question:
{question}

Right answer:
{answer}

Response:
{response}

Rate the response from 0 (wrong) to 10 (right and complete). End with a line "Score: N"."""

_CHECK_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_MAX_SHOWN = 120  # characters of a reply in a message
_PLACES = ("question", "answer", "response")


class JudgeError(Exception):
    """The judge gave no score; the text is one line with the reason."""


class Judge:
    """Reward between 0 and 1: the score that a language model gives the response, divided by `max_score`.

    `url` is the base of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1. `prompt` has the places {question},
    {answer} and {response}. The first group of `score_pattern`, at its last match in the reply, is the score; scores
    outside of 0 to `max_score` are clipped. `api_key_variable` names the environment variable with the API key.
    `timeout_s` is for all attempts together, and must be shorter than `task.grading_timeout_s`. An answer with status
    429 or 5xx, and a connection that fails, is tried again up to `retries` times. Without a score, the rollout fails.
    Raises: RecipeError if an option is wrong.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        prompt: str = PROMPT,
        score_pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)",
        max_score: float = 10.0,
        max_tokens: int = 512,
        temperature: float = 0.0,
        timeout_s: float = 9.0,
        retries: int = 3,
        api_key_variable: str | None = None,
    ) -> None:
        self._pattern = compiled("task.rewards: judge: score_pattern", score_pattern, group_holds="the number")
        if "{response}" not in prompt:
            raise RecipeError('task.rewards: judge: prompt has no place for the response; add "{response}" to it')
        if not url.startswith(("http://", "https://")):
            raise RecipeError(f"task.rewards: judge: url = {url!r} is not a URL; http://127.0.0.1:8000/v1 would work")
        for name, value in (("max_score", max_score), ("max_tokens", max_tokens), ("timeout_s", timeout_s)):
            if value <= 0:
                raise RecipeError(f"task.rewards: judge: {name} = {value} is not positive")
        self._url, self._prompt, self._max_score = url.rstrip("/"), prompt, max_score
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._timeout_s, self._retries = timeout_s, retries
        self._headers = _headers(api_key_variable)
        self._client: httpx.AsyncClient | None = None  # belongs to the event loop of the first call

    def check(self, problem: Problem) -> None:
        """Check that the server answers. Raises: RecipeError."""
        try:
            status = httpx.get(f"{self._url}/models", headers=self._headers, timeout=_CHECK_TIMEOUT_S).status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RecipeError(
                f"task.rewards: judge: cannot reach {self._url}: {_shown(error)}; start the server, or correct url"
            ) from error
        if status in (401, 403):
            raise RecipeError(
                f"task.rewards: judge: {self._url} refuses the API key (status {status}); set api_key_variable to the"
                " name of an environment variable with a valid key"
            )

    async def __call__(self, problem: Problem, response: str) -> Grade:
        texts = {"question": problem.text, "answer": problem.answer, "response": response}
        # One pass: braces in a response are not places.
        prompt = re.sub("{(" + "|".join(_PLACES) + ")}", lambda match: texts[match[1]], self._prompt)
        reply = await self._reply({**self._body, "messages": [{"role": "user", "content": prompt}]})
        found = last_match(self._pattern, reply)
        if found is None:
            raise JudgeError(f"the judge's reply has no match of {self._pattern.pattern!r}: {reply[-_MAX_SHOWN:]!r}")
        try:
            score = float(found[1])
        except (TypeError, ValueError):
            raise JudgeError(f"the judge's score {found[1]!r} is not a number") from None
        return Grade(min(max(score / self._max_score, 0.0), 1.0))

    async def _reply(self, body: dict[str, Any]) -> str:
        """Return the text of the model's reply. Raises: JudgeError after the last attempt."""
        deadline_s = time.monotonic() + self._timeout_s
        self._client = self._client or httpx.AsyncClient(headers=self._headers)
        pause_s = _FIRST_PAUSE_S
        for attempts_left in reversed(range(self._retries + 1)):
            post = self._client.post(f"{self._url}/chat/completions", json=body, timeout=None)
            try:
                answer = await asyncio.wait_for(post, max(0.0, deadline_s - time.monotonic()))
            except TimeoutError:
                raise JudgeError(f"the judge at {self._url} took longer than timeout_s = {self._timeout_s:g}") from None
            except httpx.HTTPError as error:
                reason, wanted_s = f"cannot be reached: {_shown(error)}", 0.0
            else:
                if answer.status_code == 200:
                    return _content(answer)
                reason = f"answered {answer.status_code}: {' '.join(answer.text.split())[:_MAX_SHOWN]}"
                if answer.status_code != 429 and answer.status_code < 500:
                    raise JudgeError(f"the judge at {self._url} {reason}")
                wanted_s = _seconds(answer.headers.get("retry-after", ""))
            wait_s = max(pause_s, wanted_s)
            if not attempts_left or time.monotonic() + wait_s >= deadline_s:
                break
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise JudgeError(f"the judge at {self._url} {reason}")


def _headers(api_key_variable: str | None) -> dict[str, str]:
    if api_key_variable is None:
        return {}
    key = os.environ.get(api_key_variable)
    if not key:
        raise RecipeError(
            f"task.rewards: judge: the environment variable {api_key_variable}, which api_key_variable names, is not"
            f" set; export {api_key_variable}=KEY"
        )
    return {"Authorization": f"Bearer {key}"}


def _content(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["choices"][0]["message"]["content"] or "")
    except (ValueError, LookupError, TypeError):
        raise JudgeError(f"the judge's answer is not a chat completion: {answer.text[:_MAX_SHOWN]!r}") from None


def _seconds(text: str) -> float:
    """Seconds of a Retry-After header; 0 for a date or nothing."""
    return float(text) if text.strip().isdecimal() else 0.0


def _shown(error: Exception) -> str:
    return str(error) or type(error).__name__
