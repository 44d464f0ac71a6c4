"""Scenario -> what the formulas and the simulator take. Imports no torch: simulations start at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from midflight.config import Scenario
from midflight.config.run_directory import RunDirectory
from midflight.config.scenario import (
    AffineDecodeConfig,
    ConstantLengthsConfig,
    DecodeConfig,
    LengthsConfig,
    ListedLengthsConfig,
    LogNormalLengthsConfig,
    PaperDecodeConfig,
    RunLengthsConfig,
    TableDecodeConfig,
    TrainingConfig,
    TwoPointLengthsConfig,
    UniformLengthsConfig,
)
from midflight.errors import ScenarioError
from midflight.launch.schedules import build_schedule
from midflight.protocols import Schedule
from midflight.sim.costs import PAPER_STEP_COST, AffineCost, RateTable, StepCost
from midflight.sim.lengths import (
    CycledLengths,
    GroupedLogNormal,
    IndependentLengths,
    Lengths,
    constant,
    lognormal,
    of_counts,
    two_point,
    uniform,
)
from midflight.sim.workload import Workload
from midflight.trainer.checkpoints import load_state, newest_checkpoint


def scenario_schedule(scenario: Scenario) -> Schedule:
    batch = scenario.batch
    return build_schedule(
        scenario.schedule, batch_size=batch.batch_size, group_size=batch.group_size, seed=scenario.simulation.seed
    )


def build_workload(scenario: Scenario, colocated: bool) -> Workload:
    """What the formulas take; `colocated` as it is for schedules that take turns.

    Raises: ScenarioError naming the key that cannot be; RunDirectoryError for a run without responses.
    """
    decode, section = scenario.decode, "decode"
    training, delays = training_of(scenario, colocated), scenario.delays
    if colocated:
        if scenario.colocated_decode:
            decode, section = scenario.colocated_decode, "colocated_decode"
        delays = scenario.colocated_delays or delays
    return Workload(
        num_gpus=scenario.cluster.num_gpus,
        batch_size=scenario.batch.batch_size,
        lengths=build_lengths(scenario.lengths).distribution,
        step_cost=build_step_cost(decode, section),
        train_time_per_token=training.mean_time_per_token,
        train_time_per_step=training.time_per_step,
        gpus_per_engine=1 if isinstance(decode, PaperDecodeConfig) else decode.gpus_per_engine,
        transfer=delays.transfer,
        preprocess=delays.preprocess,
        update_pause=delays.update_pause,
        handover_pause=delays.handover_pause,
    )


def training_of(scenario: Scenario, colocated: bool) -> TrainingConfig:
    return scenario.colocated_training or scenario.training if colocated else scenario.training


def build_step_cost(config: DecodeConfig, section: str = "decode") -> StepCost:
    """Raises: ScenarioError naming the key of `section` that cannot be."""
    with _within(section):
        match config:
            case PaperDecodeConfig():
                return PAPER_STEP_COST
            case TableDecodeConfig():
                return RateTable(config.sizes, config.rates, config.pad_to, config.beyond)
            case AffineDecodeConfig():
                return AffineCost(config.base, config.per_sequence, config.per_token)


def build_lengths(config: LengthsConfig) -> Lengths:
    """Raises: ScenarioError naming the key that cannot be; RunDirectoryError for a run without responses."""
    with _within("lengths"):
        match config:
            case UniformLengthsConfig():
                return IndependentLengths(uniform(config.max))
            case ConstantLengthsConfig():
                return IndependentLengths(constant(config.length))
            case LogNormalLengthsConfig() if config.group_sigma:
                return GroupedLogNormal(config.median, config.group_sigma, config.sigma, config.max)
            case LogNormalLengthsConfig():
                return IndependentLengths(lognormal(config.median, config.sigma, config.max))
            case TwoPointLengthsConfig():
                return IndependentLengths(two_point(config.short, config.long, config.long_share))
            case ListedLengthsConfig() if config.order == "cycled":
                return CycledLengths(config.lengths)
            case ListedLengthsConfig():
                return IndependentLengths(of_counts(_counts(config)))
            case RunLengthsConfig():
                return IndependentLengths(of_counts(_lengths_of_run(config.directory)))


def _counts(config: ListedLengthsConfig) -> dict[int, float]:
    counts: dict[int, float] = {}
    for length, count in zip(config.lengths, config.counts or [1.0] * len(config.lengths), strict=True):
        counts[length] = counts.get(length, 0.0) + count
    return counts


def _lengths_of_run(directory: Path) -> dict[int, float]:
    checkpoint = newest_checkpoint(RunDirectory(directory).checkpoints)
    if checkpoint is None:
        raise ScenarioError(f"directory: {directory} holds no checkpoint of a run")
    return {length: float(count) for length, count in load_state(checkpoint).generated_lengths.items()}


@contextlib.contextmanager
def _within(section: str) -> Iterator[None]:
    try:
        yield
    except ScenarioError as error:
        raise ScenarioError(f"{section}.{error}") from error
