"""GeneratorDriver: steps only while requests are in flight, updates weights, and reports failures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from midflight.errors import GenerationError, RequestError, WeightUpdateError
from midflight.generation.driver import GeneratorDriver, Progress
from midflight.testing.fakes import ScriptedGenerator
from midflight.types import Completion, FinishReason, GenerationRequest, RolloutId, SamplingParams


class WatchedGenerator(ScriptedGenerator):
    """Generator that records the threads that call it and needs two steps to swap weights in."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(lambda rollout_id: length)
        self.threads: set[str] = set()
        self.num_steps = 0
        self.steps_until_swap = 0
        self.before_step: Callable[[], None] = lambda: None

    @property
    def update_pending(self) -> bool:
        return self.steps_until_swap > 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.threads.add(threading.current_thread().name)
        if any(len(request.prompt_token_ids) == 0 for request in requests):
            raise RequestError("no prompt")
        super().add(requests)

    def step(self) -> list[Completion]:
        self.threads.add(threading.current_thread().name)
        self.before_step()
        self.num_steps += 1
        self.steps_until_swap = max(0, self.steps_until_swap - 1)
        return super().step()

    def update_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        if version < 0:
            raise WeightUpdateError("negative version")
        super().update_weights(version, weights)
        self.steps_until_swap = 2


@pytest.fixture
def generator() -> WatchedGenerator:
    return WatchedGenerator()


@pytest.fixture
def driver(generator: WatchedGenerator) -> Iterator[GeneratorDriver]:
    driver = GeneratorDriver(generator)
    yield driver
    driver.close()


def request(rollout_id: int, prompt: tuple[int, ...] = (1,)) -> GenerationRequest:
    return GenerationRequest(RolloutId(rollout_id), np.array(prompt, np.int32), SamplingParams(9), seed=0)


def unheard(progress: Progress | GenerationError) -> None:
    pytest.fail(f"unexpected progress: {progress}")


def test_driver_steps_only_while_requests_are_in_flight(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    received: queue.Queue[Any] = queue.Queue()
    driver.add([request(0), request(1)], received.put).result()
    for _ in range(2):
        progress = received.get()
        assert progress.finish_reason is FinishReason.LENGTH
        assert len(progress.generated) == 4
    driver.abort([]).result()
    assert generator.threads == {"generator"}
    assert generator.num_steps == 4
    assert driver.num_in_flight == 0
    assert driver.counters.generated_tokens == 8


def test_listener_receives_tokens_in_chunks(driver: GeneratorDriver) -> None:
    received: queue.Queue[Any] = queue.Queue()
    driver.add([request(0)], received.put, chunk_tokens=3).result()
    assert [len(received.get().generated) for _ in range(2)] == [3, 1]


def test_refused_request_leaves_others_in_flight(driver: GeneratorDriver) -> None:
    received: queue.Queue[Any] = queue.Queue()
    driver.pause().result()
    driver.add([request(0)], received.put).result()
    with pytest.raises(RequestError, match="no prompt"):
        driver.add([request(1, prompt=())], unheard).result()
    driver.resume().result()
    assert received.get().finish_reason is FinishReason.LENGTH


def test_paused_driver_does_not_step(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    received: queue.Queue[Any] = queue.Queue()
    driver.pause().result()
    driver.add([request(0)], received.put).result()
    driver.abort([]).result()
    assert generator.num_steps == 0
    (completion,) = driver.abort().result()
    assert completion.finish_reason is received.get().finish_reason is FinishReason.ABORT
    assert driver.counters.aborted == 1


@pytest.mark.parametrize("paused", [False, True])
def test_update_resolves_when_no_longer_pending(
    driver: GeneratorDriver, generator: WatchedGenerator, paused: bool
) -> None:
    """The driver takes the steps that an update needs, even if it is idle or paused."""
    if paused:
        driver.pause().result()
    pause_s = driver.update_weights(5, {}).result()
    assert pause_s >= 0
    assert not generator.update_pending
    assert generator.num_steps == 2
    assert driver.weight_version == 5
    with pytest.raises(WeightUpdateError, match="negative"):
        driver.update_weights(-1, {}).result()
    assert driver.weight_version == 5
    assert driver.counters.updates == 1


def test_failed_step_fails_requests_and_later_commands(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    def fail() -> None:
        raise MemoryError("no memory")

    generator.before_step = fail
    received: queue.Queue[Any] = queue.Queue()
    driver.add([request(0)], received.put).result()
    assert "MemoryError: no memory" in str(received.get())
    for later in (driver.add([request(1)], unheard), driver.pause(), driver.update_weights(1, {})):
        with pytest.raises(GenerationError, match="no memory"):
            later.result()


def test_failed_step_fails_the_pending_update(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    def fail() -> None:
        raise MemoryError("no memory")

    generator.before_step = fail
    with pytest.raises(GenerationError, match="no memory"):
        driver.update_weights(1, {}).result()


def test_canceled_command_is_not_executed(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go_on.wait()

    generator.before_step = hold
    received: queue.Queue[Any] = queue.Queue()
    driver.add([request(0)], received.put).result()
    entered.wait()
    canceled = driver.add([request(1)], unheard)
    assert canceled.cancel()
    go_on.set()
    assert received.get().rollout_id == 0
    driver.abort([]).result()
    assert driver.num_in_flight == 0


def test_close_fails_requests_and_later_commands(generator: WatchedGenerator) -> None:
    driver = GeneratorDriver(generator)
    driver.pause().result()
    received: queue.Queue[Any] = queue.Queue()
    driver.add([request(0)], received.put).result()
    driver.close()
    assert "shut down" in str(received.get())
    with pytest.raises(GenerationError, match="shut down"):
        driver.add([request(1)], unheard).result()
