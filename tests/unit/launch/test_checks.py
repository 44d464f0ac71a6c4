"""Checks of recipe files without models and datasets."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import RecipeError
from midflight.launch.checks import check_recipes, missing_for_checks
from refusals import Refused

PAPERS = [path for path in SHIPPED_RECIPES.values() if path.parent.name == "papers"]


def test_all_shipped_recipes_pass() -> None:
    lines = list(check_recipes(SHIPPED_RECIPES.values()))
    assert [line.partition(": ok")[0] for line in lines] == [str(path) for path in SHIPPED_RECIPES.values()]


def test_shipped_recipes_have_names_of_their_own() -> None:
    files = sorted(SHIPPED_RECIPES["cpu_demo"].parent.rglob("*.toml"))
    assert sorted(SHIPPED_RECIPES.values()) == files


def test_papers_recipes_are_all_here() -> None:
    assert len(PAPERS) == 7


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_papers_recipe_names_a_source_for_its_hyperparameters(path: Path) -> None:
    sections = path.read_text().partition("[loss]")[2].partition("[eval]")[0].splitlines()
    values = [line for line in sections if " = " in line and not line.startswith("#")]
    unsourced = [line for line in values if not any(word in line for word in ("paper", "code", "not stated"))]
    assert {line.partition(" = ")[0] for line in unsourced} <= {"device", "dtype", "zero_stage", "num_ranks", "type"}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("pipelinerl_7b", ["batch.batch_size=4096", "trainer.max_steps=1514"]),
        ("pipelinerl_7b_conventional", ["schedule.steps_per_rl_step=8"]),
        ("pipelinerl_7b_conventional", ["schedule.steps_per_rl_step=16"]),
        ("april_grpo", ["schedule.type=conventional"]),
        ("april_dapo", ["task.hub_id=zyzshishui0627/DeepMath-103K-openai-format", "trainer.max_steps=3222"]),
        ("magistral_medium", ["sampling.max_tokens=24576", "batch.max_tokens=25600", "batch.batch_size=4096"]),
        ("magistral_medium", ["sampling.max_tokens=31744", "batch.max_tokens=32768", "batch.batch_size=2048"]),
    ],
)
def test_documented_variants_load(name: str, overrides: list[str]) -> None:
    load_recipe(Path(name), overrides)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    recipe = load_recipe(
        SHIPPED_RECIPES["cpu_demo"],
        [
            f"model.path={tmp_path}",
            "task.type=dataset",
            f"task.path={tmp_path / 'rows.jsonl'}",
            'task.rewards=["exact"]',
            "streams.type=redis",
        ],
    )
    assert missing_for_checks(recipe) == [
        f"model.path: {tmp_path} has no config.json, no tokenizer.json, no *.safetensors",
        f"dataset {tmp_path / 'rows.jsonl'}",
        "the Redis server of [streams]",
    ]


def test_wrong_key_of_a_copy_is_found(tmp_path: Path, refused: Refused) -> None:
    text = SHIPPED_RECIPES["pipelinerl_7b"].read_text()
    wrong = tmp_path / "deeper" / "wrong.toml"
    wrong.parent.mkdir()
    wrong.write_text(text.replace("max_ratio", "max_ration"))
    with pytest.raises(RecipeError) as raised:
        list(check_recipes([SHIPPED_RECIPES["pipelinerl_7b"], wrong]))
    assert str(raised.value) == f"{wrong}: unknown key loss.max_ration; did you mean loss.max_ratio?"
    assert refused("config", "check", "--all", tmp_path) == f"midflight: {raised.value}"


def test_wrong_reward_needs_no_data(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(SHIPPED_RECIPES["magistral_small"].read_text().replace('"think_format"', '"thinks_format"'))
    with pytest.raises(RecipeError, match=r"wrong.toml: task.rewards: there is no 'thinks_format'; known are code"):
        list(check_recipes([wrong]))


def test_wrong_combination_needs_no_model(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    text = SHIPPED_RECIPES["pipelinerl_7b"].read_text()
    wrong.write_text(text.replace('type = "reinforce"', 'type = "decoupled_ppo"'))
    with pytest.raises(RecipeError, match=r"wrong.toml: loss.proximal_every = 4 needs an older policy"):
        list(check_recipes([wrong]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a recipe to check, or add --all"),
        (("--all", "cpu_demo", "run.seed=1"), "--all checks recipes as they are; remove run.seed=1"),
        (("--all", "nowhere"), "nowhere has no TOML files"),
    ],
)
def test_refused_arguments(arguments: tuple[str, ...], message: str, refused: Refused) -> None:
    assert refused("config", "check", *arguments) == f"midflight: {message}"
