"""The thread that owns a generator: it sleeps, steps, updates and fails as it should."""

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
    """Records which thread calls it, and takes two more steps to swap weights in."""

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
    pytest.fail(f"nobody should hear of {progress}")


def test_everything_happens_in_one_thread_and_only_while_in_flight(
    driver: GeneratorDriver, generator: WatchedGenerator
) -> None:
    heard: queue.Queue[Any] = queue.Queue()
    driver.add([request(0), request(1)], heard.put).result()
    for _ in range(2):
        progress = heard.get()
        assert progress.finish_reason is FinishReason.LENGTH
        assert len(progress.generated) == 4
    driver.abort([]).result()
    assert generator.threads == {"generator"}
    assert generator.num_steps == 4
    assert driver.num_in_flight == 0
    assert driver.counters.generated_tokens == 8


def test_chunks(driver: GeneratorDriver) -> None:
    heard: queue.Queue[Any] = queue.Queue()
    driver.add([request(0)], heard.put, chunk_tokens=3).result()
    assert [len(heard.get().generated) for _ in range(2)] == [3, 1]


def test_a_request_that_does_not_fit_is_its_own_problem(driver: GeneratorDriver) -> None:
    heard: queue.Queue[Any] = queue.Queue()
    driver.pause().result()
    driver.add([request(0)], heard.put).result()
    with pytest.raises(RequestError, match="no prompt"):
        driver.add([request(1, prompt=())], unheard).result()
    driver.resume().result()
    assert heard.get().finish_reason is FinishReason.LENGTH


def test_paused_means_no_step(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    heard: queue.Queue[Any] = queue.Queue()
    driver.pause().result()
    driver.add([request(0)], heard.put).result()
    driver.abort([]).result()
    assert generator.num_steps == 0
    (completion,) = driver.abort().result()
    assert completion.finish_reason is heard.get().finish_reason is FinishReason.ABORT
    assert driver.counters.aborted == 1


@pytest.mark.parametrize("paused", [False, True])
def test_an_update_is_done_when_it_is_no_longer_pending(
    driver: GeneratorDriver, generator: WatchedGenerator, paused: bool
) -> None:
    """With nothing in flight and even while paused: the steps that it takes are made."""
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


def test_a_step_that_fails_ends_everything(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    def fail() -> None:
        raise MemoryError("no memory")

    generator.before_step = fail
    heard: queue.Queue[Any] = queue.Queue()
    driver.add([request(0)], heard.put).result()
    assert "MemoryError: no memory" in str(heard.get())
    for later in (driver.add([request(1)], unheard), driver.pause(), driver.update_weights(1, {})):
        with pytest.raises(GenerationError, match="no memory"):
            later.result()


def test_an_update_that_a_failing_step_interrupts_fails(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    def fail() -> None:
        raise MemoryError("no memory")

    generator.before_step = fail
    with pytest.raises(GenerationError, match="no memory"):
        driver.update_weights(1, {}).result()


def test_a_command_canceled_in_time_is_not_carried_out(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go_on.wait()

    generator.before_step = hold
    heard: queue.Queue[Any] = queue.Queue()
    driver.add([request(0)], heard.put).result()
    entered.wait()
    canceled = driver.add([request(1)], unheard)
    assert canceled.cancel()
    go_on.set()
    assert heard.get().rollout_id == 0
    driver.abort([]).result()
    assert driver.num_in_flight == 0


def test_closing_tells_whoever_waits(generator: WatchedGenerator) -> None:
    driver = GeneratorDriver(generator)
    driver.pause().result()
    heard: queue.Queue[Any] = queue.Queue()
    driver.add([request(0)], heard.put).result()
    driver.close()
    assert "shut down" in str(heard.get())
    with pytest.raises(GenerationError, match="shut down"):
        driver.add([request(1)], unheard).result()
