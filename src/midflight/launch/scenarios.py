"""Scenario -> inputs of the formulas and the simulator. Does not import torch, so that simulations start at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from midflight.config import Scenario
from midflight.config import scenario as config
from midflight.config.run_directory import RunDirectory
from midflight.errors import ScenarioError
from midflight.launch.schedules import build_schedule
from midflight.protocols import Schedule
from midflight.sim.costs import PAPER_STEP_COST, AffineCost, RateTable, StepCost
from midflight.sim.lengths import (
    CycledLengths,
    GroupedLogNormal,
    Lengths,
    constant,
    from_counts,
    lognormal,
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
    """Return the input of the formulas; `colocated` selects the costs of schedules that take turns.

    Raises: ScenarioError naming the wrong key; RunDirectoryError for a run without responses.
    """
    decode, section, delays = scenario.decode, "decode", scenario.delays
    if colocated and scenario.colocated_decode:
        decode, section = scenario.colocated_decode, "colocated_decode"
    if colocated:
        delays = scenario.colocated_delays or delays
    training = training_of(scenario, colocated)
    return Workload(
        num_gpus=scenario.cluster.num_gpus,
        batch_size=scenario.batch.batch_size,
        lengths=build_lengths(scenario.lengths).distribution,
        step_cost=build_step_cost(decode, section),
        train_time_per_token=training.mean_time_per_token,
        train_time_per_step=training.time_per_step,
        gpus_per_engine=1 if isinstance(decode, config.PaperDecodeConfig) else decode.gpus_per_engine,
        **delays.model_dump(),
    )


def training_of(scenario: Scenario, colocated: bool) -> config.TrainingConfig:
    return scenario.colocated_training or scenario.training if colocated else scenario.training


def build_step_cost(decode: config.DecodeConfig, section: str = "decode") -> StepCost:
    """Return the cost of decoding. Raises: ScenarioError naming the wrong key of `section`."""
    with _within(section):
        match decode:
            case config.PaperDecodeConfig():
                return PAPER_STEP_COST
            case config.TableDecodeConfig():
                return RateTable(decode.sizes, decode.rates, decode.pad_to, decode.beyond)
            case config.AffineDecodeConfig():
                return AffineCost(decode.base, decode.per_sequence, decode.per_token)


def build_lengths(lengths: config.LengthsConfig) -> Lengths:
    """Return the response lengths. Raises: RunDirectoryError or ScenarioError for a run without responses."""
    match lengths:
        case config.UniformLengthsConfig():
            return uniform(lengths.max)
        case config.ConstantLengthsConfig():
            return constant(lengths.length)
        case config.LogNormalLengthsConfig() if lengths.group_sigma:
            return GroupedLogNormal(lengths.median, lengths.group_sigma, lengths.sigma, lengths.max)
        case config.LogNormalLengthsConfig():
            return lognormal(lengths.median, lengths.sigma, lengths.max)
        case config.TwoPointLengthsConfig():
            return two_point(lengths.short, lengths.long, lengths.long_share)
        case config.ListedLengthsConfig() if lengths.order == "cycled":
            return CycledLengths(lengths.lengths)
        case config.ListedLengthsConfig():
            return from_counts(lengths.lengths, lengths.counts)
        case config.RunLengthsConfig():
            checkpoint = newest_checkpoint(RunDirectory(lengths.directory).checkpoints)
            if checkpoint is None:
                raise ScenarioError(f"lengths.directory: {lengths.directory} has no checkpoint of a run")
            generated = load_state(checkpoint).generated_lengths
            with _within("lengths"):
                return from_counts([*generated], [*generated.values()])


@contextlib.contextmanager
def _within(section: str) -> Iterator[None]:
    try:
        yield
    except ScenarioError as error:
        raise ScenarioError(f"{section}.{error}") from error
