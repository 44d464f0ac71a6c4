"""GeneratorDriver: steps only while requests are in flight, adopts staged weights, and reports failures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from midflight.errors import GenerationError, GenerationLostError, RequestError, WeightUpdateError
from midflight.generation.driver import GeneratorDriver, Progress
from midflight.protocols import IncomingWeights
from midflight.testing.fakes import ScriptedGenerator
from midflight.types import Completion, FinishReason, GenerationRequest, RolloutId, SamplingParams, WeightLabel


class WatchedGenerator(ScriptedGenerator):
    """LocalEngine without weights that records the threads that call it."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(lambda rollout_id: length)
        self.threads: set[str] = set()
        self.num_steps = 0
        self.staged: IncomingWeights | None = None
        self.asked: int | None = None
        self.before_step: Callable[[], None] = lambda: None

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.threads.add(threading.current_thread().name)
        if any(len(request.prompt_token_ids) == 0 for request in requests):
            raise RequestError("no prompt")
        super().add(requests)

    def step(self) -> list[Completion]:
        self.threads.add(threading.current_thread().name)
        self.before_step()
        self.num_steps += 1
        if self.staged and self.asked is not None and self.staged.version >= self.asked:
            self.weight_version, self.staged, self.asked = self.staged.version, None, None
        return super().step()

    def stage(self, incoming: IncomingWeights) -> None:
        assert threading.current_thread().name != "generator"
        for name, _ in incoming.tensors:
            raise WeightUpdateError(f"the engine has no weight {name}")
        self.staged = incoming

    def adopt(self, version: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.asked = version


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


def weights(version: int, lineage: str = "", content: int | None = None) -> IncomingWeights:
    return IncomingWeights(version, version if content is None else content, [], lineage=lineage)


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("asked_first", [False, True])
def test_idle_or_paused_driver_adopts_staged_weights_in_one_step(
    driver: GeneratorDriver, generator: WatchedGenerator, paused: bool, asked_first: bool
) -> None:
    if paused:
        driver.pause().result()
    if asked_first:
        adopted = driver.adopt("", 5)
        driver.stage(weights(6, content=4))
    else:
        driver.stage(weights(6, content=4))
        assert driver.staged == WeightLabel(6, 4)
        assert driver.active == WeightLabel(0, 0), "staged weights wait for a wish"
        adopted = driver.adopt("", 5)
    assert adopted.result() == driver.active == WeightLabel(6, 4)
    assert driver.staged is None
    assert generator.num_steps == 1
    assert generator.threads == {"generator"}
    assert (driver.counters.updates, driver.counters.update_pause_s > 0) == (1, True)


def test_wish_for_weights_in_use_is_granted_at_once(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    assert driver.adopt("", 0).result().version == 0
    assert generator.num_steps == 0


def test_wish_waits_for_a_version_that_is_new_enough(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    adopted = driver.adopt("", 5)
    driver.stage(weights(4))
    assert not adopted.done()
    assert generator.num_steps == 0
    driver.stage(weights(5))
    assert adopted.result().version == 5
    assert driver.counters.updates == 1


def test_other_lineage_replaces_newer_weights_and_aborts_requests(
    driver: GeneratorDriver, generator: WatchedGenerator
) -> None:
    driver.stage(weights(50, "first"))
    driver.adopt("first", 50).result()
    received: queue.Queue[Any] = queue.Queue()
    driver.pause().result()
    driver.add([request(0)], received.put).result()
    adopted = driver.adopt("second", 3)
    driver.stage(weights(60, "first"))
    assert not adopted.done(), "weights of another lineage do not fulfil the wish"
    driver.stage(weights(3, "second"))
    assert adopted.result() == driver.active == WeightLabel(3, 3, "second")
    assert received.get().finish_reason is FinishReason.ABORT
    assert generator.weight_version == 3


def test_failed_staging_keeps_the_weights_in_use(driver: GeneratorDriver) -> None:
    adopted = driver.adopt("", 1)
    with pytest.raises(WeightUpdateError, match="no weight x"):
        driver.stage(IncomingWeights(1, 1, [("x", np.zeros(1))]))  # type: ignore[list-item]
    assert (driver.active.version, driver.staged, adopted.done()) == (0, None, False)
    driver.stage(weights(2))
    assert adopted.result().version == 2


def test_unusable_weights_fail_no_request(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    """An engine with one set of weights may have lost them in an update; it samples again after the next one."""

    def fail_once() -> None:
        generator.before_step = lambda: None
        raise WeightUpdateError("the engine has no weights")

    generator.before_step = fail_once
    received: queue.Queue[Any] = queue.Queue()
    driver.add([request(0)], received.put).result()
    assert received.get().finish_reason is FinishReason.LENGTH
    assert driver.failure is None


def test_wind_down_ends_requests_and_wishes(driver: GeneratorDriver) -> None:
    received: queue.Queue[Any] = queue.Queue()
    driver.pause().result()
    driver.add([request(0)], received.put).result()
    adopted = driver.adopt("", 1)
    driver.wind_down().result()
    assert received.get().finish_reason is FinishReason.ABORT
    with pytest.raises(GenerationLostError, match="the server is shutting down"):
        adopted.result()


def test_failed_step_fails_requests_and_later_commands(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    def fail() -> None:
        raise MemoryError("no memory")

    generator.before_step = fail
    received: queue.Queue[Any] = queue.Queue()
    driver.add([request(0)], received.put).result()
    assert "MemoryError: no memory" in str(received.get())
    for later in (driver.add([request(1)], unheard), driver.pause(), driver.adopt("", 1)):
        with pytest.raises(GenerationError, match="no memory"):
            later.result()
    with pytest.raises(GenerationError, match="no memory"):
        driver.stage(weights(1))


def test_failed_step_fails_the_wish(driver: GeneratorDriver, generator: WatchedGenerator) -> None:
    def fail() -> None:
        raise MemoryError("no memory")

    generator.before_step = fail
    adopted = driver.adopt("", 1)
    driver.stage(weights(1))
    with pytest.raises(GenerationError, match="no memory"):
        adopted.result()


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
