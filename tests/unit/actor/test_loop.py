"""The rollout loop asks for versions and waits, with a generator that adopts late."""

from __future__ import annotations

from midflight.actor.actor import Actor, ActorConfig
from midflight.actor.loop import Intervals, RolloutLoop
from midflight.models.prompts import PromptFormat
from midflight.schedules.conventional import ConventionalSchedule
from midflight.schedules.pipeline import PipelineSchedule
from midflight.streams.memory import MemoryStream
from midflight.testing.fakes import CountingEnvironment, DigitTokenizer, ImmediateGrader, ScriptedGenerator
from midflight.tracing.spans import Tracer
from midflight.types import ChosenBatch, SamplingParams


class Loop:
    """A rollout loop over a generator whose weights arrive `update_steps` steps late; `waits` counts its waits."""

    def __init__(self, schedule: ConventionalSchedule | PipelineSchedule, update_steps: int, length: int) -> None:
        self.generator = ScriptedGenerator(lambda rollout: length, update_steps)
        environment, prompts = CountingEnvironment(), PromptFormat(DigitTokenizer())
        config = ActorConfig(2, 1, SamplingParams(max_tokens=100), seed=0)
        self.actor = Actor(config, self.generator, environment, ImmediateGrader(environment), prompts)
        self.stream: MemoryStream[ChosenBatch] = MemoryStream(100)
        self.tracer = Tracer(None, "test")
        self.waits = 0
        self.loop = RolloutLoop(
            self.actor, self.generator, schedule, self, self.stream, self.tracer, intervals=Intervals(grades_s=0)
        )

    def newest_version(self) -> int:
        raise AssertionError("the test says which version is the newest")

    def wait(self, newer_than: int, timeout_s: float) -> bool:
        self.waits += 1
        return False

    def close(self) -> None: ...


def test_an_idle_loop_steps_without_a_wait_until_the_version_is_here() -> None:
    run = Loop(ConventionalSchedule(2), update_steps=1, length=3)
    while not run.waits:
        run.loop.iteration(0)
    assert (run.generator.num_in_flight, run.generator.weight_version) == (0, 0)
    run.waits = 0
    run.loop.iteration(1)
    assert (run.generator.weight_version, run.waits) == (1, 0)
    run.loop.iteration(1)
    assert run.generator.num_in_flight == 2
    assert run.actor.state.num_updates == 1
    assert run.tracer.total_s("update") > 0, "an idle step of an update is a pause"


def test_a_late_update_takes_no_wait_though_the_queue_is_full() -> None:
    run = Loop(PipelineSchedule(2, num_in_flight=2, queue_capacity=2), update_steps=50, length=10)
    run.loop.iteration(0)
    versions = []
    for _ in range(50):
        run.loop.iteration(1)
        versions.append(run.generator.weight_version)
        assert run.waits == 0
    assert run.generator.num_in_flight == 0, "the loop stepped with nothing in flight"
    run.loop.iteration(1)
    assert (set(versions), run.generator.weight_version) == ({0}, 1)


def test_a_newer_version_replaces_a_pending_one() -> None:
    run = Loop(PipelineSchedule(2, num_in_flight=2, queue_capacity=8), update_steps=5, length=100)
    run.loop.iteration(0)
    versions = []
    for newest in range(1, 8):
        run.loop.iteration(newest)
        versions.append(run.generator.weight_version)
    assert versions == [0, 0, 0, 0, 0, 6, 6]
    assert run.actor.state.num_updates == 1
