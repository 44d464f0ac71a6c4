"""PullingGenerator with a scripted receiver: who waits for the tensors, and how many steps an update may take."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from midflight.engine.pulling import PullingGenerator
from midflight.errors import NonFiniteWeightsError, WeightsReplacedError
from midflight.models.loading import weights_of
from midflight.protocols import IncomingWeights
from midflight.testing.tiny_models import tiny_engine, tiny_model
from midflight.types import GenerationRequest, RolloutId, SamplingParams

WEIGHTS = weights_of(tiny_model(seed=1))


class ScriptedReceiver:
    """A WeightReceiver that offers `newest`; its tensors come when `allow` is set, and `trouble` comes first."""

    def __init__(self, newest: int = 1) -> None:
        self.newest, self.allow = newest, threading.Event()
        self.trouble: list[Exception] = []
        self.received: list[int] = []

    def newest_version(self) -> int:
        return self.newest

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        return self.newest > newer_than

    def close(self) -> None:
        pass

    def receive(self) -> IncomingWeights:
        self.received.append(self.newest)
        return IncomingWeights(self.newest, self.newest, self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        self.allow.wait()
        if self.trouble:
            raise self.trouble.pop(0)
        yield from WEIGHTS.items()


def request(number: int, max_tokens: int = 24) -> GenerationRequest:
    return GenerationRequest(RolloutId(number), np.array([2, 3], np.int32), SamplingParams(max_tokens), 0)


def pulling(receiver: ScriptedReceiver, max_steps: int = 8) -> PullingGenerator:
    return PullingGenerator(tiny_engine(tiny_model()), receiver, max_steps)


def versions(generator: PullingGenerator, number: int = 0) -> list[int]:
    return [int(version) for version in generator.generated(RolloutId(number)).weight_versions]


def test_steps_go_on_until_the_tensors_are_here() -> None:
    receiver = ScriptedReceiver()
    generator = pulling(receiver)
    generator.add([request(0)])
    generator.adopt(1)
    for _ in range(3):
        generator.step()
    receiver.allow.set()
    while generator.weight_version == 0:
        generator.step()
    generator.step()
    sampled = versions(generator)
    assert sampled == sorted(sampled)
    assert sampled[:3] == [0, 0, 0]
    assert sampled[-1] == 1


def test_last_step_of_an_update_waits() -> None:
    receiver = ScriptedReceiver()
    generator = pulling(receiver, max_steps=5)
    generator.add([request(0)])
    generator.adopt(1)
    for _ in range(4):
        generator.step()
    threading.Timer(0.01, receiver.allow.set).start()
    generator.step()
    assert versions(generator) == [0, 0, 0, 0, 1]


def test_update_of_an_idle_engine_comes_before_the_next_token() -> None:
    receiver = ScriptedReceiver()
    generator = pulling(receiver)
    generator.adopt(1)
    generator.add([request(0)])
    threading.Timer(0.01, receiver.allow.set).start()
    generator.step()
    assert versions(generator) == [1]


def test_version_asked_for_while_idle_overtakes_a_pull() -> None:
    receiver = ScriptedReceiver()
    generator = pulling(receiver)
    generator.add([request(0, max_tokens=1)])
    generator.adopt(1)
    assert len(generator.step()) == 1
    receiver.newest = 2
    generator.adopt(2)
    generator.add([request(1)])
    receiver.allow.set()
    generator.step()
    assert versions(generator, 1) == [2]
    assert receiver.received == [1, 2]


def test_newer_version_is_pulled_after_the_update() -> None:
    receiver = ScriptedReceiver()
    generator = pulling(receiver, max_steps=2)
    generator.add([request(0)])
    generator.adopt(1)
    generator.step()
    receiver.newest = 3
    for version in (2, 3, 2):
        generator.adopt(version)
    receiver.allow.set()
    for _ in range(3):
        generator.step()
    sampled = versions(generator)
    assert (sampled[:2], sampled[-1], set(sampled)) == ([0, 1], 3, {0, 1, 3})
    assert receiver.received == [1, 3]


def test_overwritten_weights_are_read_again() -> None:
    receiver = ScriptedReceiver()
    receiver.trouble = [WeightsReplacedError("overwritten"), WeightsReplacedError("overwritten")]
    receiver.allow.set()
    generator = pulling(receiver)
    generator.adopt(1)
    generator.step()
    assert generator.weight_version == 1
    assert len(receiver.received) == 3


def test_error_of_a_pull_is_raised_once() -> None:
    receiver = ScriptedReceiver()
    receiver.trouble = [NonFiniteWeightsError("bad")]
    receiver.allow.set()
    generator = pulling(receiver, max_steps=1)
    generator.add([request(0)])
    generator.adopt(1)
    with pytest.raises(NonFiniteWeightsError, match="bad"):
        generator.step()
    generator.step()
    assert versions(generator) == [0]
    generator.adopt(1)
    generator.step()
    assert versions(generator) == [0, 1]


def test_sender_that_went_back_ends_the_wish() -> None:
    receiver = ScriptedReceiver(newest=0)
    receiver.allow.set()
    generator = pulling(receiver)
    generator.adopt(1)
    generator.step()
    generator.step()
    assert (generator.weight_version, receiver.received) == (0, [0])


def test_pulled_weights_sample_as_a_fresh_engine() -> None:
    receiver = ScriptedReceiver()
    receiver.allow.set()
    generator, fresh = pulling(receiver), tiny_engine(tiny_model(seed=1))
    generator.adopt(1)
    for each in (generator, fresh):
        each.add([request(0)])
        for _ in range(5):
            each.step()
    actual, expected = (each.generated(RolloutId(0)) for each in (generator, fresh))
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.allclose(torch.from_numpy(actual.logprobs), torch.from_numpy(expected.logprobs), atol=1e-6)


def test_short_pull_is_waited_for() -> None:
    receiver = ScriptedReceiver()
    generator = pulling(receiver)
    generator.add([request(0)])
    generator._pull_s, generator._step_s = 0.0, 60.0  # as if a step took far longer than a copy
    generator.adopt(1)
    threading.Timer(0.01, receiver.allow.set).start()
    generator.step()
    assert versions(generator) == [1]
