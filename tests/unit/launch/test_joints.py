"""The user's own implementations: each works in place of a built-in one; a wrong one is refused in one line."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch

import own_parts
from midflight.config import SHIPPED_RECIPES, load_recipe, load_scenario
from midflight.config.run_directory import RunDirectory
from midflight.errors import MidflightError, RecipeError
from midflight.launch.build import build_advantage, check_recipe, recipe_schedule
from midflight.launch.engines import build_engine
from midflight.launch.environments import build_environment
from midflight.launch.importing import Joint, members_of
from midflight.launch.metrics import open_sinks
from midflight.launch.simulation import simulate_scenario
from midflight.launch.streams import open_batches, open_groups
from midflight.launch.weights import build_transport
from midflight.metrics.jsonl import read_metrics
from midflight.models.loading import load_config, load_model, weights_of
from midflight.protocols import LocalEngine, Schedule, Stream
from midflight.report.simulation_table import simulation_json
from midflight.run.directory import create_run
from midflight.schedules.pipeline import PipelineSchedule
from midflight.testing.fakes import CountingEnvironment
from midflight.types import GenerationRequest, RolloutId, SamplingParams, TensorSpec
from narrowing import present

ROOT = Path(__file__).parents[3]
RECIPE = SHIPPED_RECIPES["cpu_demo"]
JOINTS = {
    "schedule.type": ("Schedule", "num_to_admit, should_abort, choose_batch, should_update_weights"),
    "task.type": ("Environment", "problem, held_out_problems, grade"),
    "engine.type": (
        "LocalEngine",
        "weight_version, num_in_flight, num_engines, add, generated, step, abort, adopt, stage",
    ),
    "streams.type": ("Stream", "append, append_many, read, trim, skip_to, next_offset, close"),
    "weights.type": ("WeightTransport", "sender, versions, receiver"),
    "metrics.sinks": ("MetricsSink", "write, close"),
}


def override(key: str, path: str) -> str:
    return f"{key}=['{path}']" if key == "metrics.sinks" else f"{key}={path}"


def refusal(*overrides: str) -> str:
    with pytest.raises(MidflightError) as raised:
        check_recipe(load_recipe(RECIPE, overrides))
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("key", [*JOINTS, "loss.type", "advantage.type"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Thing", "cannot import 'no_such_module:Thing': No module named 'no_such_module'"),
        (
            "own_parts:Missing",
            f"cannot import 'own_parts:Missing': module 'own_parts' has no attribute 'Missing' ({own_parts.__file__})",
        ),
        ("own_parts:number", "'own_parts:number' is of type int, not a class or function"),
    ],
)
def test_wrong_import_path_is_one_line(key: str, path: str, message: str) -> None:
    assert refusal(override(key, path)) == f"{key}: {message}"


@pytest.mark.parametrize("key", JOINTS)
def test_class_without_the_protocols_members_is_refused(key: str) -> None:
    protocol, missing = JOINTS[key]
    message = refusal(override(key, "own_parts:Nothing"))
    assert message.startswith(f"{key}: 'own_parts:Nothing' does not implement {protocol}: it lacks ")
    assert missing in message


@pytest.mark.parametrize("section", ["schedule", "engine", "streams", "weights", "advantage", "loss"])
def test_unknown_name_is_refused_with_the_known_names(section: str) -> None:
    message = refusal(f"{section}.type=magic")
    assert re.fullmatch(rf"{section}\.type: there is no 'magic'; known are .+, package\.module:name", message)


def test_unknown_options_are_one_line() -> None:
    message = refusal("schedule.type=own_parts:InTurns", "schedule.options.sideways=true")
    assert message == ("schedule.options: own_parts:InTurns: got an unexpected keyword argument 'sideways'")
    assert refusal("weights.type=own_parts:OwnDirectory").endswith("missing a required argument: 'name'")
    assert "'sideways'" in refusal("metrics.sinks=[{type = 'own_parts:TextSink', options = {sideways = 1}}]")
    assert "'sideways'" in refusal("advantage.type=own_parts:centered", "advantage.options.sideways=1")


def test_error_of_a_schedules_constructor_is_one_line() -> None:
    message = refusal("schedule.type=own_parts:Raises")
    assert message.startswith("schedule.type: own_parts:Raises, the constructor: LookupError: no such table (")
    assert re.search(r"own_parts\.py:\d+\)$", message)


def test_members_of_a_protocol_include_attributes_and_inherited_members() -> None:
    class Base(Protocol):
        name: str

    class Derived(Base, Protocol):
        @property
        def size(self) -> int: ...

        def run(self) -> None: ...

    assert members_of(Derived) == ["name", "size", "run"]
    assert {"weight_version", "adopt", "stage"} <= set(members_of(LocalEngine))
    assert "next_offset" in members_of(Stream)


@dataclass
class Declared:
    colocated: bool
    max_in_flight: int


def test_members_may_be_declared_or_assigned_in_the_constructor() -> None:
    joint: Joint[Schedule] = Joint("schedule.type", {}, Schedule)
    with pytest.raises(RecipeError) as raised:
        joint._check_members("here:Declared", Declared)
    assert "colocated" not in str(raised.value)
    assert "max_in_flight" not in str(raised.value)
    assert isinstance(joint.make("own_parts:InTurns", {"batch_size": 2, "seed": 1}, {}).colocated, bool)


def test_built_in_schedule_gets_the_batch_and_its_options() -> None:
    schedule = recipe_schedule(load_recipe(RECIPE, ["schedule.max_lag=2", "batch.batch_size=16"]))
    assert schedule == PipelineSchedule(16, 64, 16 * 3, 2)


def test_environment_needs_no_seed() -> None:
    recipe = load_recipe(RECIPE, ["task.type=midflight.testing.fakes:CountingEnvironment"])
    assert isinstance(build_environment(recipe), CountingEnvironment)


def test_own_advantage_gets_its_options() -> None:
    recipe = load_recipe(RECIPE, ["advantage.type=own_parts:centered", "advantage.options.scale=2.0"])
    advantage = build_advantage(recipe)
    assert advantage is not None
    assert advantage(np.array([0.0, 1.0, 1.0])).tolist() == [-2, 0, 0]


def test_own_engine_generates_like_the_engine_it_wraps(tmp_path: Path) -> None:
    log = tmp_path / "log"
    own = ["engine.type=own_parts:logging_engine", f"engine.options.log={log}", "engine.threads=1"]
    path = load_recipe(RECIPE).model.path
    weights = weights_of(load_model(path))
    prompts = [np.array([3, 4, 5], np.int32), np.array([6, 7], np.int32)]
    generated = []
    for overrides in ([], own):
        engine = build_engine(load_recipe(RECIPE, overrides), load_config(path), weights, max_num_seqs=2, version=5)
        requests = [GenerationRequest(RolloutId(i), prompt, SamplingParams(6), 0) for i, prompt in enumerate(prompts)]
        engine.add(requests)
        completions = []
        while engine.num_in_flight:
            completions += engine.step()
        assert engine.weight_version == 5
        generated.append({done.rollout_id: done.generated.token_ids.tolist() for done in completions})
    assert generated[0] == generated[1]
    assert log.read_text() == "chain_sums 2\n"


def run_of(tmp_path: Path, *overrides: str) -> RunDirectory:
    return create_run(load_recipe(RECIPE, [f"run.directory={tmp_path / 'run'}", *overrides]))


def test_own_streams_get_the_arguments_they_name(tmp_path: Path) -> None:
    run = run_of(tmp_path, "streams.type=own_parts:CountedStream", "streams.options.suffix=.count")
    recipe = load_recipe(run.config)
    with closing(open_batches(run, recipe)) as batches, closing(open_groups(run, recipe)) as groups:
        assert batches.next_offset() == groups.next_offset() == 0
        assert type(batches).__name__ == "CountedStream"
    assert run.batches.exists()
    assert run.groups.exists()


def test_own_transport_carries_weights(tmp_path: Path) -> None:
    run = run_of(tmp_path, "weights.type=own_parts:OwnDirectory", "weights.options.name=mine")
    transport = build_transport(load_recipe(run.config), run, tmp_path / "shared", "first start", print)
    receiver = present(transport.receiver())
    with closing(transport.sender()) as sender, closing(transport.versions()) as versions:
        sender.announce([TensorSpec("head", (2,), "float32")])
        sender.send(4, [("head", torch.tensor([1.0, 2.0]))])
        sender.relabel(5)
        assert versions.newest_version() == 5
        incoming = receiver.receive()
        ((name, tensor),) = incoming.tensors
    assert (incoming.version, incoming.content, name, tensor.tolist()) == (5, 4, "head", [1, 2])
    assert (run.path / "mine").is_dir()


def test_a_transport_gets_the_servers_of_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, "weights.type=own_parts:ToServers", "engine.type=http")
    run.engines.mkdir()
    (run.engines / "one.json").write_text('{"url": "http://10.0.0.1:8000/"}')
    (run.engines / "broken.json").write_text("{")
    transport = build_transport(load_recipe(run.config), run, tmp_path / "shared", "first start", print)
    assert (vars(transport)["urls"], vars(transport)["lineage"]) == ({"one": "http://10.0.0.1:8000"}, "first start")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights.type=shared_memory", "engine.type=http"], "weights.type = 'process_group' or 'files' would work"),
        (["weights.type=process_group"], "weights.type = 'shared_memory' would work"),
        (
            ["engine.type=http", "weights.backend=nccl", "engine.device=cuda"],
            "weights.backend = 'nccl' connects CUDA devices only, but trainer.device = 'cpu'; weights.backend = 'tcp'"
            " would work",
        ),
    ],
)
def test_transports_that_cannot_reach_the_engines_are_refused(overrides: list[str], message: str) -> None:
    assert refusal(*overrides).endswith(message)


@pytest.mark.parametrize(
    ("overrides", "backend", "snapshot"),
    [
        ([], "tcp", True),
        (["trainer.type=fsdp"], "tcp", False),
        (["trainer.device=cuda", "engine.device=cuda:1"], "nccl", True),
        (
            ["trainer.device=cuda", "engine.device=cuda", "weights.backend=tcp", "weights.snapshot=false"],
            "tcp",
            False,
        ),
    ],
)
def test_process_group_options_follow_the_recipe(
    overrides: list[str], backend: str, snapshot: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without `weights.type`, servers get their weights through a process group."""
    given: dict[str, object] = {}
    monkeypatch.setattr(Joint, "make", lambda joint, name, offered, options: given.update(options, type=name))
    recipe = load_recipe(RECIPE, ["engine.type=http", "weights.timeout_s=5", *overrides])
    build_transport(recipe, RunDirectory(tmp_path), tmp_path, "first start", print)
    assert given == {
        "type": "process_group",
        "backend": backend,
        "snapshot": snapshot,
        "address": None,
        "bucket_mib": 32,
        "timeout_s": 5.0,
    }


def test_failing_sink_does_not_affect_the_others(tmp_path: Path) -> None:
    sinks = (
        "metrics.sinks=['own_parts:TextSink', {type = 'own_parts:TextSink', options = {name = 'more'}},"
        " 'own_parts:FailingSink']"
    )
    run = run_of(tmp_path, sinks)
    noted: list[str] = []
    with closing(open_sinks(load_recipe(run.config), run, 3, noted.append)) as metrics:
        metrics.write({"version": 4, "reward/mean": 0.5})
        metrics.write({"version": 5, "reward/mean": 0.25})
    assert [line["version"] for line in read_metrics(run.metrics)] == [4, 5]
    assert (run.path / "more.txt").read_text() == "after 3\n4 0.5\n5 0.25\n"
    assert noted == ["metrics sink own_parts:FailingSink failed and gets no more lines: ConnectionError: nobody there"]


def test_own_schedule_is_simulated() -> None:
    """The schedule of the test decides like the conventional one, so the results are equal."""
    small = ["batch.batch_size=64", "lengths.max=64", "simulation.num_steps=30", "simulation.num_warm_up_steps=0"]
    scenario = ROOT / "scenarios" / "paper.toml"
    own, conventional = (
        simulation_json(simulate_scenario(load_scenario(scenario, [*small, f"schedule.type={name}"])), None)
        for name in ("own_parts:InTurns", "conventional")
    )
    assert own == conventional
