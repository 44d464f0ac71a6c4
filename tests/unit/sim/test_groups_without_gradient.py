"""Groups without a gradient cost no training time, in the simulator and in the formulas."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from midflight.config import Scenario
from midflight.config.scenario import (
    ConstantLengthsConfig,
    ListedLengthsConfig,
    ScenarioBatchConfig,
    SimulationConfig,
    TrainingConfig,
)
from midflight.config.schedules import ConventionalConfig
from midflight.launch.scenarios import build_workload
from midflight.launch.simulation import simulate_scenario


def scenario(fraction: float) -> Scenario:
    return Scenario(
        batch=ScenarioBatchConfig(batch_size=32, group_size=8),
        lengths=ConstantLengthsConfig(length=50),
        schedule=ConventionalConfig(),
        training=TrainingConfig(time_per_token=128.0, time_per_step=3.0, without_gradient_fraction=fraction),
        simulation=SimulationConfig(num_steps=400, num_warm_up_steps=0),
    )


def training_times(fraction: float) -> np.ndarray:
    return np.array([batch.end - batch.start for batch in simulate_scenario(scenario(fraction)).batches])


def test_groups_cost_training_time_as_a_whole() -> None:
    assert training_times(0.0) == pytest.approx(3.0 + 32 * 50)
    assert training_times(1.0) == pytest.approx(3.0)
    some = (training_times(0.75) - 3.0) / (8 * 50)
    assert some == pytest.approx(some.round()), "siblings have a gradient together"
    assert set(some.round()) == {0.0, 1.0, 2.0, 3.0, 4.0}
    assert some.mean() == pytest.approx(1.0, abs=0.15)


def test_list_selects_groups_with_gradient() -> None:
    listed = scenario(0.5).model_copy(
        update={
            "lengths": ListedLengthsConfig(
                lengths=(10,) * 8 + (30,) * 8 + (20,) * 8, order="cycled", has_gradient=(True, False, True)
            )
        }
    )
    times = [batch.end - batch.start for batch in simulate_scenario(listed).batches[:3]]
    # Groups of 10, 30, 20 tokens, repeated; four make a batch, and the group of 30 takes no time.
    assert times == pytest.approx([3.0 + 8 * tokens for tokens in (10 + 20 + 10, 20 + 10, 20 + 10 + 20)])


def test_number_of_flags_must_match_groups() -> None:
    with pytest.raises(
        ValidationError, match=r"lengths.has_gradient has 2 groups, which does not fit 8 lengths in groups of"
    ):
        Scenario(
            batch=ScenarioBatchConfig(batch_size=32, group_size=8),
            lengths=ListedLengthsConfig(lengths=(10,) * 8, order="cycled", has_gradient=(True, False)),
        )


def test_tokens_without_gradient_count_as_trained() -> None:
    assert {batch.num_tokens for batch in simulate_scenario(scenario(0.75)).batches} == {32 * 50}


def test_formulas_use_the_mean_fraction() -> None:
    assert build_workload(scenario(0.75), colocated=True).train_time_per_token == pytest.approx(32.0)
