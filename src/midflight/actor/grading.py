"""The one boundary to what users write to judge answers: whatever it does becomes an answer or a reason."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

from midflight.actor.failures import log_once, reason_of
from midflight.envs.one_turn import with_turns
from midflight.protocols import Environment, GradedTask
from midflight.types import Grade, GradedResponse, Problem, RolloutId, Text

_MAX_LIVE_EPISODES = 4096  # an episode that is dropped is repeated from its responses when it goes on


class LiveEpisodes:
    """The episodes of one process, by rollout. Each is a shallow copy of the environment."""

    def __init__(self, environment: Environment | GradedTask) -> None:
        self._environment = with_turns(environment)
        self._live: dict[RolloutId, _Episode] = {}  # those that go on, longest idle first

    def answer(self, rollout_id: RolloutId, problem: Problem, responses: Sequence[str]) -> GradedResponse:
        """The environment's answer to the last response, or why there is none, in one line; never raises."""
        try:
            episode = self._continued(rollout_id, problem, responses[:-1])
            said: object = episode.environment.step(responses[-1])
            if not isinstance(said, str | list):
                return GradedResponse(rollout_id, _checked(said))
            text = _checked_text(said)
            episode.responses.append(responses[-1])
            self._live[rollout_id] = episode
            if len(self._live) > _MAX_LIVE_EPISODES:
                del self._live[next(iter(self._live))]
            return GradedResponse(rollout_id, None, text=text)
        except (Exception, SystemExit) as error:
            log_once(error)
            return GradedResponse(rollout_id, None, reason_of(error))

    def _continued(self, rollout_id: RolloutId, problem: Problem, earlier: Sequence[str]) -> _Episode:
        """The live episode, or a new one in which the earlier responses are repeated."""
        episode = self._live.pop(rollout_id, None)
        if episode is None or episode.problem != problem or episode.responses != earlier[: len(episode.responses)]:
            episode = _Episode(problem, copy.copy(self._environment))
            episode.environment.reset(problem)
        for response in earlier[len(episode.responses) :]:
            if isinstance(episode.environment.step(response), Grade):
                raise RuntimeError("the environment ended an episode that it had continued after the same responses")
            episode.responses.append(response)
        return episode


@dataclass(slots=True)
class _Episode:
    problem: Problem
    environment: Environment
    responses: list[str] = field(default_factory=list)  # taken so far


def _checked(grade: object) -> Grade:
    """Raises: TypeError, ValueError."""
    if not isinstance(grade, Grade):
        raise TypeError(f"step() returned a {type(grade).__name__}, neither text nor a Grade")
    components = {}
    for name, value in grade.components.items():
        if not isinstance(name, str):
            raise TypeError(f"a component is named {name!r}, which is no string")
        components[name] = _number(f"component {name!r}", value)
    return Grade(_number("reward", grade.reward), components)


def _checked_text(text: Text) -> Text:
    """Raises: TypeError."""
    for message in text if isinstance(text, list) else ():
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise TypeError(f"step() returned a message {message!r}, not a dict with role and content")
        if not isinstance(message.get("content"), str):
            raise TypeError(f"step() returned a message whose content is a {type(message.get('content')).__name__}")
    return text


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"the {name} is a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the {name} is {number}")
    return number
