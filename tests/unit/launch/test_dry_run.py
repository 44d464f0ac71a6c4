"""`midflight train --dry-run`: roles, memory and expectation, without starting anything."""

from __future__ import annotations

import json
import multiprocessing.process
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from midflight.cli import app
from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe, load_scenario
from midflight.config.scenario import ListedLengthsConfig, Scenario, SimulationConfig
from midflight.launch.dry_run import dry_run, expectation
from midflight.launch.planning import estimate_scenario
from midflight.report.dry_run import dry_run_text
from midflight.run.roles import worker_bodies
from refusals import Refused

DEMO = SHIPPED_RECIPES["cpu_demo"]
SCENARIOS = Path(__file__).parents[3] / "scenarios"


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make every start of a process an error; return the empty working directory."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr("os.fork", refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_demo(*overrides: str) -> Recipe:
    return load_recipe(DEMO, overrides)


def processes(values: dict[str, Any]) -> dict[str, Any]:
    return {process["process"]: process for process in values["memory"]["processes"]}


def test_command_prints_json_and_starts_nothing(nothing_starts: Path) -> None:
    result = CliRunner().invoke(app, ["train", "cpu_demo", "--dry-run", "--json"], catch_exceptions=False)
    values = json.loads(result.stdout)
    assert values["run"] == "cpu_demo"
    assert values["model"]["parameters"] == 597_120
    assert values["not_checked"] == []
    assert list(nothing_starts.iterdir()) == []


def test_command_prints_the_numbers_as_text(nothing_starts: Path) -> None:
    text = CliRunner().invoke(app, ["train", "pipelinerl_7b", "--dry-run"], catch_exceptions=False).stdout
    for part in ("7.62 billion parameters", "trains (deepspeed)", "cuda:0 to cuda:7", "any number", "31.50 GiB"):
        assert part in text
    assert "expected speed and lag: unknown without --scenario FILE" in text
    assert "has no tokenizer.json" in text


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("trainer.type=fsdp", "trainer.num_ranks=2"),
        ("preprocess.num_workers=1", "engine.type=http"),
        ("loss.kl_coefficient=0.1", "preprocess.num_workers=3"),
    ],
)
def test_roles_are_the_processes_of_a_run(overrides: tuple[str, ...]) -> None:
    recipe = of_demo(*overrides)
    roles = {role["role"]: role["processes"] for role in dry_run(recipe)["roles"]}
    assert roles.pop("grader") == recipe.task.num_graders
    assert roles.pop("server", None) is None
    started = [name.partition("-")[0] for name in worker_bodies(recipe)]
    assert roles == {role: started.count(role) for role in started}


def test_devices_add_up_what_shares_them() -> None:
    memory = dry_run(of_demo("loss.kl_coefficient=0.1"))["memory"]
    assert memory["devices"] == {"cpu": sum(process["total"] for process in memory["processes"])}
    assert "reference model" in processes({"memory": memory})
    three = dry_run(of_demo("loss.kl_coefficient=0.1", "preprocess.num_workers=3"))
    each = processes(three)["reference model, each process"]["total"]
    assert three["memory"]["devices"]["cpu"] == memory["devices"]["cpu"] + 2 * each
    ranks = dry_run(of_demo("trainer.type=fsdp", "trainer.num_ranks=2"))
    each = processes(ranks)["trainer, each rank"]["total"]
    others = sum(process["total"] for process in ranks["memory"]["processes"]) - each
    assert ranks["memory"]["devices"] == {"cpu": 2 * each + others}


def test_memory_is_unknown_without_a_config(tmp_path: Path) -> None:
    values = dry_run(of_demo(f"model.path={tmp_path}"))
    assert values["memory"] is None
    assert "memory: unknown without a config.json" in dry_run_text(values)


def test_config_of_another_model_can_be_given(tmp_path: Path) -> None:
    config = DEMO.parent / "models" / "chain_sums" / "config.json"
    values = dry_run(of_demo(f"model.path={tmp_path}"), model_config=config)
    assert values["model"]["parameters"] == 597_120


def test_sequences_beyond_the_context_are_named() -> None:
    text = dry_run_text(dry_run(of_demo("sampling.max_tokens=4000")))
    assert "too long: the model's context is" in text


def quick_scenario(name: str) -> Scenario:
    scenario = load_scenario(SCENARIOS / name)
    steps = SimulationConfig(time_unit=scenario.simulation.time_unit, num_steps=24, num_warm_up_steps=8)
    return scenario.model_copy(update={"simulation": steps})


def test_expectation_has_the_recipes_schedule_and_batch() -> None:
    scenario = quick_scenario("cpu_demo.toml")
    lag = {
        steps: expectation(of_demo("schedule.type=conventional", f"schedule.steps_per_rl_step={steps}"), scenario)
        for steps in (1, 4)
    }
    assert [lag[steps]["simulated"]["lag/max"] for steps in (1, 4)] == [0, 3]
    assert lag[4]["formulas"]["lag/max"] == 3
    figures = lag[4]["simulated"]
    assert isinstance(scenario.lengths, ListedLengthsConfig)
    mean_length = figures["throughput/trained_tokens"] / figures["samples"]
    assert mean_length == pytest.approx(np.mean(scenario.lengths.lengths[8 * 32 : 24 * 32]), rel=0.1)
    text = dry_run_text(dry_run(of_demo(), scenario))
    assert "expected by the planner's model, not measured: 2 devices, 1 engines" in text
    assert "samples per s" in text


def test_papers_experiment_has_twice_the_rate_of_its_baseline() -> None:
    scenario = load_scenario(SCENARIOS / "pipelinerl_7b.toml")
    pipeline, conventional = (
        estimate_scenario(scenario.model_copy(update={"schedule": load_recipe(Path(name)).schedule}))
        for name in ("pipelinerl_7b", "pipelinerl_7b_conventional")
    )
    assert pipeline is not None
    assert conventional is not None
    assert pipeline.rate / conventional.rate == pytest.approx(1.976, rel=0.01)
    assert pipeline.max_lag * scenario.batch.batch_size > 50_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scenario", "x.toml"), "--scenario and --model-config belong to --dry-run; add it or remove them"),
        (("--dry-run", "--resume"), "--dry-run and --resume cannot be used together; remove one of them"),
    ],
)
def test_refused_options(arguments: tuple[str, ...], message: str, refused: Refused) -> None:
    assert refused("train", "cpu_demo", *arguments) == f"midflight: {message}"
