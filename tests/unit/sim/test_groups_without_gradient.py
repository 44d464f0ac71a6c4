"""Groups that have no gradient are trained on in no time, by the simulator and by the formulas."""

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


def test_whole_groups_take_their_time_or_none() -> None:
    assert training_times(0.0) == pytest.approx(3.0 + 32 * 50)
    assert training_times(1.0) == pytest.approx(3.0)
    some = (training_times(0.75) - 3.0) / (8 * 50)
    assert some == pytest.approx(some.round()), "siblings have a gradient together"
    assert set(some.round()) == {0.0, 1.0, 2.0, 3.0, 4.0}
    assert some.mean() == pytest.approx(1.0, abs=0.15)


def test_a_list_says_which_groups() -> None:
    listed = scenario(0.5).model_copy(
        update={
            "lengths": ListedLengthsConfig(
                lengths=(10,) * 8 + (30,) * 8 + (20,) * 8, order="cycled", has_gradient=(True, False, True)
            )
        }
    )
    times = [batch.end - batch.start for batch in simulate_scenario(listed).batches[:3]]
    # Groups of 10, 30, 20 tokens, four to a batch, and the second of three takes no time.
    assert times == pytest.approx([3.0 + 8 * tokens for tokens in (10 + 20 + 10, 20 + 10, 20 + 10 + 20)])


def test_as_many_flags_as_groups() -> None:
    with pytest.raises(ValidationError, match=r"lengths.has_gradient has 2 groups, and 8 lengths in groups of"):
        Scenario(
            batch=ScenarioBatchConfig(batch_size=32, group_size=8),
            lengths=ListedLengthsConfig(lengths=(10,) * 8, order="cycled", has_gradient=(True, False)),
        )


def test_all_tokens_are_trained_either_way() -> None:
    assert {batch.num_tokens for batch in simulate_scenario(scenario(0.75)).batches} == {32 * 50}


def test_formulas_take_the_mean() -> None:
    assert build_workload(scenario(0.75), colocated=True).train_time_per_token == pytest.approx(32.0)
