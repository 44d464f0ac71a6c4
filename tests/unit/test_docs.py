"""Commands and code of the documentation, checked without running them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from midflight import cli
from midflight.config import SHIPPED_RECIPES, load_recipe, load_scenario
from midflight.experiments.variants import parse_variants
from midflight.launch.build import check_recipe
from midflight.launch.planning import estimate_scenario
from midflight.trainer import deepspeed

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
TEMPLATE = ROOT / "src" / "midflight" / "project_template"
STARTING_PAGES = [
    ROOT / "docs" / "getting-started.md", TEMPLATE / "README.md", ROOT / "examples" / "my_task" / "README.md",
]  # fmt: skip
# A line of its own, or text in backquotes.
COMMAND = re.compile(r"(?:^|`)(midflight (?:demo|train cpu_demo|compare cpu_demo)[^`#\n]*)", re.MULTILINE)
COMMANDS = sorted({found.strip() for page in PAGES for found in COMMAND.findall(page.read_text())})

SCENARIO_COMMAND = re.compile(r"^(?:\$ )?(midflight (?:plan|simulate) scenarios/[^#\n]+)", re.MULTILINE)
SCENARIO_COMMANDS = sorted({found.strip() for page in PAGES for found in SCENARIO_COMMAND.findall(page.read_text())})


@pytest.fixture(autouse=True)
def as_in_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the repository, with the documented loss and task as modules."""
    for page, module in (("docs/algorithms.md", "my_losses.py"), ("README.md", "my_task.py")):
        (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        (tmp_path / module).write_text(block)
    (tmp_path / "my_loss.py").write_bytes((ROOT / "examples" / "my_loss.py").read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)


def recipes_of(command: str) -> list[list[str]]:
    """Return the overrides of every run of a command."""
    _, verb, *arguments = shlex.split(command.replace("\\\n", " "))
    overrides = [each for each in arguments if re.fullmatch(r"\w+\.\w+=.*", each)]
    if verb in ("demo", "train"):
        return [overrides]
    for option, section in (("--schedules", "schedule"), ("--losses", "loss")):
        if option in arguments:
            variants = parse_variants(section, arguments[arguments.index(option) + 1])
            return [[*overrides, *variant.overrides] for variant in variants]
    raise AssertionError(f"no variants in: {command}")


def test_the_documentation_has_commands() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_pass_their_checks(command: str) -> None:
    for overrides in recipes_of(command):
        recipe = load_recipe(SHIPPED_RECIPES["cpu_demo"], overrides)
        if recipe.trainer.type == "deepspeed" and not deepspeed.is_installed():
            pytest.skip("the package deepspeed is not installed")
        check_recipe(recipe)


@pytest.mark.parametrize("page", STARTING_PAGES, ids=lambda page: page.parent.name)
def test_commands_for_beginners_parse(page: Path) -> None:
    lines = re.findall(r"^ *midflight .+", page.read_text(), re.MULTILINE)
    assert lines
    group = typer.main.get_group(cli.app)
    context = typer.Context(group, info_name="midflight")
    for line in lines:
        command: Any = group
        arguments = shlex.split(line, comments=True)[1:]
        while hasattr(command, "resolve_command"):
            _, command, arguments = command.resolve_command(context, arguments)
            assert command is not None, line
        with command.make_context("midflight", arguments, parent=context) as parsed:
            recipe = parsed.params.get("target") or parsed.params.get("recipe_path")
            if str(recipe) == "recipe.toml":
                name = next(each for each in (page.parent, TEMPLATE) if (each / recipe).exists())
                load_recipe(name / recipe, parsed.params["overrides"] or [])


def test_the_first_page_shows_the_project_template() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", STARTING_PAGES[0].read_text(), re.DOTALL)
    assert block == (TEMPLATE / "digit_sums.py").read_text()


def test_the_documentation_has_scenario_commands() -> None:
    assert len(SCENARIO_COMMANDS) >= 8


@pytest.mark.parametrize("command", SCENARIO_COMMANDS)
def test_documented_scenarios_load(command: str) -> None:
    _, verb, path, *arguments = shlex.split(command)
    scenario = load_scenario(ROOT / path, [each for each in arguments if re.fullmatch(r"\w+\.\w+=.*", each)])
    options = {each for each in arguments if each.startswith("--")}
    assert options <= ({"--max-lag", "--max-mean-lag", "--rate", "--lag"} if verb == "plan" else set())
    estimate_scenario(scenario)


def test_the_documented_loss_has_a_gradient() -> None:
    import torch

    from midflight.launch.objectives import build_loss
    from midflight.losses.inputs import LossInputs

    recipe = load_recipe(
        SHIPPED_RECIPES["cpu_demo"],
        ["loss.type=my_losses:mine", "loss.options={sharpness = 2.0}"],
    )
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    ones = torch.ones(2)
    inputs = LossInputs(policy, -ones, ones, ones, torch.zeros(2, dtype=torch.int64), 1)
    output = build_loss(recipe)(inputs)
    output.loss.backward()
    assert policy.grad is not None
    assert (policy.grad < 0).all()
    assert output.token_metrics["gain"].tolist() == pytest.approx([0.5, 1 / (1 + torch.tensor(2.0).exp().item())])
