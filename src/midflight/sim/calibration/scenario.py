"""Recorded runs -> the scenario they measured.

Costs change while a policy learns: responses get longer, and groups whose rewards are all equal need no forward pass.
So training, delays and lengths are those of the long runs, which should last as long as what is to be predicted. All
that the short ones add is how fast engines are with other numbers of sequences in flight.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from midflight.config import Recipe, Scenario
from midflight.config.scenario import (
    ClusterConfig,
    DelaysConfig,
    ListedLengthsConfig,
    ScenarioBatchConfig,
    SimulationConfig,
    TableDecodeConfig,
    TrainingConfig,
)
from midflight.launch.build import num_threads
from midflight.sim.calibration.decode import DecodeTable, fit_table
from midflight.sim.calibration.runs import RecordedRun
from midflight.sim.calibration.training import Delays, TrainingCost, colocated_delays, fit_training, split_delays

_MAX_LENGTHS = 65_536  # rollouts in the file


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one way to run, both phases at the same time or in turns."""

    decode: DecodeTable
    training: TrainingCost
    delays: Delays


def scenario_of(recipe: Recipe, recorded: Sequence[RecordedRun]) -> Scenario:
    """Raises: BenchmarkError if a run is too short to measure."""
    at_once = [run for run in recorded if not run.plan.colocated]
    in_turns = [run for run in recorded if run.plan.colocated]
    split, colocated = _costs(at_once), _costs(in_turns)
    engine_devices, trainer_devices = _devices(recipe)
    num_devices = engine_devices + trainer_devices
    return Scenario(
        cluster=ClusterConfig(num_gpus=num_devices, num_engines=1),
        batch=ScenarioBatchConfig(
            batch_size=recipe.batch.batch_size,
            group_size=recipe.batch.group_size,
            filter_rate=_rounded(_filter_rate(at_once[0], recipe.batch.group_size)),
        ),
        lengths=_lengths_section(at_once[0], recipe.batch.group_size),
        schedule=recipe.schedule,
        decode=_decode_section(split.decode, engine_devices),
        training=_training_section(split.training, trainer_devices),
        colocated_decode=_decode_section(colocated.decode, num_devices),
        colocated_training=_training_section(colocated.training, num_devices),
        delays=_delays_section(split.delays),
        colocated_delays=_delays_section(colocated.delays),
        simulation=SimulationConfig(time_unit="s"),
    )


def _costs(runs: Sequence[RecordedRun]) -> Costs:
    """The first run is the long one."""
    long = runs[0]
    turns = [turn for run in runs for turn in run.turns]
    training = fit_training(long.lines)
    if long.plan.colocated:
        mean_length = statistics.fmean(length for run in runs for length in run.lengths)
        return Costs(fit_table(turns, mean_length), training, colocated_delays(long.rollout, long.trainer, long.lines))
    mean_turn_s = statistics.fmean(turn.seconds for turn in long.turns) if long.turns else 0.0
    return Costs(fit_table(turns), training, split_delays(long.rollout, long.trainer, long.lines, mean_turn_s))


def _devices(recipe: Recipe) -> tuple[int, int]:
    """Of an engine and of the trainer while both are at work: cores on a CPU, else one each and one for each rank."""
    engine, trainer = recipe.engine, recipe.trainer
    of_engine = num_threads(engine.threads, colocated=False) if engine.device == "cpu" else 1
    if trainer.device != "cpu":
        return of_engine, trainer.num_ranks
    if trainer.threads is not None:
        return of_engine, trainer.num_ranks * trainer.threads
    return of_engine, num_threads(None, colocated=False)


def _decode_section(table: DecodeTable, num_devices: int) -> TableDecodeConfig:
    return TableDecodeConfig(gpus_per_engine=num_devices, sizes=table.sizes, rates=table.rates, beyond="hold")


def _training_section(cost: TrainingCost, num_devices: int) -> TrainingConfig:
    return TrainingConfig(
        time_per_token=_rounded(cost.time_per_token * num_devices),
        time_per_step=_rounded(cost.time_per_step),
        without_gradient_fraction=_rounded(cost.without_gradient_fraction),
    )


def _delays_section(delays: Delays) -> DelaysConfig:
    return DelaysConfig(**{name: _rounded(value) for name, value in asdict(delays).items()})


def _filter_rate(run: RecordedRun, group_size: int) -> float:
    num_filtered = sum(line["dropped/filtered_groups"] for line in run.lines)
    num_rollouts = sum(len(line["length/by_rollout"]) for line in run.lines)
    return float(num_filtered / max(num_filtered + num_rollouts / group_size, 1))


def _lengths_section(run: RecordedRun, group_size: int) -> ListedLengthsConfig:
    """Of as many whole groups as fit a file, evenly over the run, so that siblings stay together.

    Which of them have a gradient is part of it: those with long responses have one more often, and ever fewer do.
    """
    lengths, has_gradient = (_groups(values, group_size) for values in (run.lengths, run.has_gradient))
    num_kept = min(len(lengths), max(1, _MAX_LENGTHS // group_size))
    kept = [index * len(lengths) // num_kept for index in range(num_kept)]
    return ListedLengthsConfig(
        lengths=tuple(max(1, length) for index in kept for length in lengths[index]),
        order="cycled",
        has_gradient=tuple(any(has_gradient[index]) for index in kept),
    )


def _groups(values: Sequence[int], group_size: int) -> list[Sequence[int]]:
    return [values[start : start + group_size] for start in range(0, len(values), group_size)]


def _rounded(value: float) -> float:
    """To four digits, which is more than is known."""
    return float(f"{value:.4g}")
