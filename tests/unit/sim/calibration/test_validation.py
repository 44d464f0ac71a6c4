"""Validation: predictions come before the runs, and only matching scenarios are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from midflight.config import SHIPPED_RECIPES, Scenario, dump_toml, load_recipe
from midflight.config.scenario import (
    ConstantLengthsConfig,
    DelaysConfig,
    ScenarioBatchConfig,
    SimulationConfig,
    TableDecodeConfig,
    TrainingConfig,
)
from midflight.errors import RecipeError, ScenarioError
from midflight.experiments.variants import parse_variants
from midflight.sim.calibration import validation as validation_module
from midflight.sim.calibration.validation import predict, validate, validation_table

RECIPE = SHIPPED_RECIPES["cpu_demo"]
DECODE = TableDecodeConfig(gpus_per_engine=1, sizes=(64,), rates=(64e3,), beyond="hold")  # a step takes 1 ms
SCENARIO = Scenario(
    cluster={"num_gpus": 2, "num_engines": 1},
    batch=ScenarioBatchConfig(batch_size=32, group_size=8),
    lengths=ConstantLengthsConfig(length=10),
    decode=DECODE,
    training=TrainingConfig(time_per_token=0.0, time_per_step=0.04),
    colocated_decode=DECODE.model_copy(update={"gpus_per_engine": 2}),
    colocated_training=TrainingConfig(time_per_token=0.0, time_per_step=0.01),
    colocated_delays=DelaysConfig(transfer=0.002, preprocess=0.003),
    simulation=SimulationConfig(time_unit="s"),
)


def changed_recipe(directory: Path, *overrides: str) -> Path:
    path = directory / "recipe.toml"
    path.write_text(dump_toml(load_recipe(RECIPE, overrides)))
    return path


@pytest.mark.slow
def test_prediction_ends_with_first_step_past_the_seconds() -> None:
    recipe = load_recipe(RECIPE, ["schedule.type=conventional"])
    # 10 ms of decoding, 3 ms until training starts, 10 ms of training, 2 ms until the next token.
    for seconds in (1.0, 30.0):
        num_steps = round(seconds / 0.025)
        elapsed = (num_steps + 1) * 0.025 - 0.002
        figures = predict(SCENARIO, recipe, seconds)
        assert figures["trained_tokens_per_s"] == pytest.approx((num_steps + 1) * 320 / elapsed, rel=1e-6)
        assert (figures["mean_lag"], figures["max_lag"]) == (0.0, 0.0)


def test_prediction_uses_the_recipes_schedule() -> None:
    pipeline = predict(SCENARIO, load_recipe(RECIPE, ["schedule.num_in_flight=32"]), 10.0)
    assert pipeline["trained_tokens_per_s"] == pytest.approx(320 / 0.04, rel=0.01), "training is the slower side"
    assert pipeline["max_lag"] >= 1


def test_runs_follow_predictions_with_another_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def simulated(scenario: Scenario, recipe: Any, seconds: float) -> dict[str, float]:
        happened.append(f"predict {recipe.schedule.type}")
        return {"trained_tokens_per_s": 110.0, "mean_lag": 0.0, "max_lag": 1.0}

    def train(recipe: Path, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
        happened.append(f"run {directory.name}")
        assert load_recipe(recipe, overrides).run.seed == 6
        assert load_recipe(recipe, overrides).trainer.max_seconds == 4.0
        return {"trained_tokens": 400, "train_wall_s": 4.0, "mean_lag": 0.0, "max_lag": 0}

    monkeypatch.setattr(validation_module, "predict", simulated)
    monkeypatch.setattr(validation_module, "train", train)
    variants = parse_variants("schedule", "pipeline,conventional:steps_per_rl_step=4")
    result = validate(SCENARIO, changed_recipe(tmp_path, "run.seed=5"), variants, 4.0, print)
    assert happened == [
        "predict pipeline", "predict conventional", "run pipeline", "run conventional-steps_per_rl_step-4",
    ]  # fmt: skip
    first = result["rows"][0]
    assert first["error"]["trained_tokens_per_s"] == pytest.approx(0.1)
    assert first["error"]["mean_lag"] == 0.0, "0 was predicted and measured"
    assert first["error"]["max_lag"] is None, "no relative error of 0"
    table = validation_table(result["rows"])
    assert "+10.0 %" in table
    assert table.count("\n") == 2 * 3


@pytest.mark.parametrize(
    ("scenario", "overrides", "seconds", "error", "message"),
    [
        (SCENARIO, [], 0.0, RecipeError, "--seconds: should be greater than 0, got 0"),
        (SCENARIO, ["batch.batch_size=64"], 1.0, ScenarioError, "batch.batch_size = 32, but the recipe has 64"),
        (Scenario(), [], 1.0, ScenarioError, "simulation.time_unit = 'flash': runs are measured in seconds"),
    ],
)
def test_mismatched_scenario_is_refused(
    scenario: Scenario, overrides: list[str], seconds: float, error: type[Exception], message: str, tmp_path: Path
) -> None:
    recipe = changed_recipe(tmp_path, *overrides)
    with pytest.raises(error, match=message):
        validate(scenario, recipe, parse_variants("schedule", "pipeline"), seconds, print)
