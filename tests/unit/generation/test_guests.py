"""Guests: sequences of other clients take turns, give way to the run, and continue with the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from contract.generating import LONG, drain, requests
from midflight.errors import GenerationError
from midflight.generation.driver import GeneratorDriver, Progress
from midflight.generation.guests import Guests
from midflight.testing.fakes import ScriptedGenerator
from midflight.testing.tiny_models import tiny_engine, tiny_model
from midflight.types import FinishReason, GenerationRequest, RolloutId, SamplingParams


def request(rollout_id: int) -> GenerationRequest:
    return GenerationRequest(RolloutId(rollout_id), np.array([1], np.int32), SamplingParams(9), seed=0)


def scripted() -> ScriptedGenerator:
    return ScriptedGenerator(lambda rollout_id: 5)


def test_clients_take_turns() -> None:
    guests = Guests(scripted(), 3)
    guests.add([request(each) for each in range(4)], "greedy")
    guests.add([request(9)], "modest")
    started, taken_out = guests.balance(0, False, 0.0)
    assert [each.rollout_id for each in started] == [0, 9, 1]
    assert not taken_out


def test_guests_give_way_to_a_run_and_continue() -> None:
    engine = scripted()
    guests = Guests(engine, 4)
    guests.add([request(0), request(1)], "a")
    guests.balance(0, False, 0.0)
    engine.step()
    assert guests.balance(4, True, 1.0) == ([], [0, 1])
    assert engine.num_in_flight == 0
    assert (guests.num_running, len(guests)) == (0, 2)
    started, _ = guests.balance(0, False, 9.0)
    assert [len(each.generated or ()) for each in started] == [1, 1]
    assert {completion.rollout_id for completion in drain(engine).values()} == {0, 1}


def test_waiting_guests_are_aborted_with_their_tokens() -> None:
    engine = scripted()
    guests = Guests(engine, 1)
    guests.add([request(0), request(1), request(2)], "a")
    guests.balance(0, False, 0.0)
    engine.step()
    guests.balance(1, True, 1.0)
    (first, second) = guests.take_waiting([RolloutId(0), RolloutId(2), RolloutId(7)])
    assert [first.rollout_id, second.rollout_id] == [0, 2]
    assert (len(first.generated), first.finish_reason) == (1, FinishReason.ABORT)
    assert [each.rollout_id for each in guests.balance(0, False, 9.0)[0]] == [1]


@pytest.fixture
def interrupted() -> Iterator[GeneratorDriver]:
    """Driver of an engine with two slots, of a run that connects and leaves again and again."""
    driver = GeneratorDriver(tiny_engine(tiny_model(), max_new_tokens=24, max_num_seqs=2), 2)
    yield driver
    driver.close()


def test_interrupted_guests_have_the_tokens_of_undisturbed_ones(interrupted: GeneratorDriver) -> None:
    """The run takes both slots three times; the guests' streams go on where they were."""
    engine = tiny_engine(tiny_model(), max_new_tokens=24)
    engine.add(requests(2, LONG))
    expected = {key: completion.generated.token_ids.tolist() for key, completion in drain(engine).items()}
    guests, driver = interrupted.numbered(requests(2, LONG)), interrupted
    received: dict[int, list[int]] = {each.rollout_id: [] for each in guests}
    ended: set[int] = set()
    rounds = itertools.count()

    def listen(progress: Progress | GenerationError) -> None:
        assert isinstance(progress, Progress)
        received[progress.rollout_id] += progress.generated.token_ids.tolist()
        if progress.finish_reason is not None:
            ended.add(progress.rollout_id)
        if sum(map(len, received.values())) % 7 == 0 and next(rounds) < 3:
            driver.num_runs = 1
            driver.add(driver.numbered(replace(each, sampling=SamplingParams(6)) for each in requests(2, LONG)), leave)

    def leave(progress: Progress | GenerationError) -> None:
        driver.num_runs = 0

    driver.add(guests, listen, 1, "guest").result()
    while len(ended) < 2:
        driver.abort([]).result()
    assert {each.name: received[each.rollout_id] for each in guests} == expected
    assert next(rounds) >= 3


def test_aborted_guests_free_their_places(interrupted: GeneratorDriver) -> None:
    heard: list[Progress | GenerationError] = []
    interrupted.pause().result()
    guests = interrupted.numbered(requests(5, LONG))
    interrupted.add(guests, heard.append, None, "guest").result()
    assert interrupted.num_in_flight == 5
    assert len(interrupted.abort([each.rollout_id for each in guests]).result()) == len(heard) == 5
    assert interrupted.num_in_flight == 0
