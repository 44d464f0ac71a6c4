"""Calibration: short real runs of a recipe -> the scenario they measured, as a file and as text.

Costs change while a policy learns: responses get longer, and groups with equal rewards need no forward pass. So
training, delays and lengths come from the long runs, which should last as long as the runs to be predicted. The short
runs only add the speed of engines with other numbers of sequences in flight.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from midflight.config import Recipe, Scenario, dump_toml, load_recipe
from midflight.config.scenario import (
    ClusterConfig,
    DelaysConfig,
    ListedLengthsConfig,
    ScenarioBatchConfig,
    SimulationConfig,
    TableDecodeConfig,
    TrainingConfig,
)
from midflight.config.section import Section
from midflight.errors import RecipeError
from midflight.experiments.runs import Report, RunLength, check_overrides
from midflight.launch.build import check_recipe, num_threads
from midflight.report.machine import describe_machine
from midflight.report.text_table import text_table
from midflight.run.directory import create_directory, write_atomically
from midflight.sim.calibration.measure import (
    RecordedRun,
    colocated_delays,
    fit_table,
    fit_training,
    planned_runs,
    record_all,
    split_delays,
)
from midflight.sim.costs import RateTable

_MAX_LENGTHS = 65_536  # largest number of rollouts in the file of lengths
_BUSY = 0.5  # load average above which other programs disturb the measurement (cores)
_OURS = {"run.directory": "--out-runs"} | dict.fromkeys(
    ("trainer.max_seconds", "trainer.max_steps", "trainer.checkpoint_every"), "--seconds"
)

AnySection = TypeVar("AnySection", bound=Section)


def calibrate(
    recipe_path: Path, overrides: Sequence[str], seconds: float, runs: Path | None, report: Report
) -> tuple[Scenario, dict[str, Any]]:
    """Measure a scenario; return it, and the same figures with the machine, the recipe and the runs.

    `seconds`: duration of each long run. `runs`: new or empty directory to keep the runs in; None deletes them.
    Raises: before the first run, RecipeError or ModelError if a run would fail with it or cannot be measured, and
        RunDirectoryError if `runs` is not empty; later, WorkerError if a run fails and BenchmarkError if a run is too
        short.
    """
    RunLength(seconds=seconds).check()
    check_overrides(overrides, _OURS, "calibration")
    recipe = load_recipe(recipe_path, overrides)
    if recipe.engine.type == "http":
        raise RecipeError("engine.type = 'http': calibration starts no servers; use 'embedded'")
    check_recipe(recipe)
    plans = planned_runs(recipe)
    for plan in plans:
        check_recipe(load_recipe(recipe_path, [*overrides, *plan.overrides]))
    machine = describe_machine()
    if float(machine["load_average_1min"]) > _BUSY:
        report(f"this machine is busy (load average {machine['load_average_1min']}): it will be measured as too slow")
    with tempfile.TemporaryDirectory(prefix="midflight-runs-") as temporary:
        if runs:
            create_directory(runs)
        out = runs.resolve() if runs else Path(temporary)
        recorded = record_all(plans, recipe_path, overrides, seconds, out, report)
    scenario = scenario_of(recipe, recorded)
    assert isinstance(scenario.lengths, ListedLengthsConfig)
    lengths = scenario.lengths.lengths
    return scenario, {
        "machine": machine,
        "recipe": str(recipe_path),
        "overrides": list(overrides),
        "seconds": seconds,
        **scenario.model_dump(mode="json", exclude={"lengths", "failures", "simulation"}, exclude_none=True),
        "lengths": {"mean": statistics.fmean(lengths), "max": max(lengths), "listed": len(lengths)},
        "runs": [run.figures() for run in recorded],
    }


def scenario_of(recipe: Recipe, recorded: Sequence[RecordedRun]) -> Scenario:
    """Build the scenario from recorded runs; the first run of each kind (overlapping, in turns) is the long one.

    Raises: BenchmarkError if a run is too short to measure.
    """
    overlapping = [run for run in recorded if not run.plan.colocated]
    in_turns = [run for run in recorded if run.plan.colocated]
    long, long_in_turns, group_size = overlapping[0], in_turns[0], recipe.batch.group_size
    engine_devices, trainer_devices = _devices(recipe)
    num_devices = engine_devices + trainer_devices
    mean_iteration_s = statistics.fmean(step.seconds for step in long.iterations) if long.iterations else 0.0
    mean_length = statistics.fmean(length for run in in_turns for length in run.by_rollout("length"))
    return Scenario(
        cluster=ClusterConfig(num_gpus=num_devices, num_engines=1),
        batch=ScenarioBatchConfig(
            batch_size=recipe.batch.batch_size,
            group_size=group_size,
            filter_rate=_four_digits(_filter_rate(long, group_size)),
        ),
        lengths=_lengths_section(long, group_size),
        schedule=recipe.schedule,
        decode=fit_table([step for run in overlapping for step in run.iterations], None, engine_devices),
        training=_rounded(fit_training(long.lines, trainer_devices)),
        colocated_decode=fit_table([step for run in in_turns for step in run.iterations], mean_length, num_devices),
        colocated_training=_rounded(fit_training(long_in_turns.lines, num_devices)),
        delays=_rounded(split_delays(long.rollout, long.trainer, long.lines, mean_iteration_s)),
        colocated_delays=_rounded(colocated_delays(long_in_turns.rollout, long_in_turns.trainer, long_in_turns.lines)),
        simulation=SimulationConfig(time_unit="s"),
    )


def write_scenario(path: Path, scenario: Scenario) -> None:
    """Write the scenario as TOML, and the lengths of all rollouts to a file beside it.

    Raises: RunDirectoryError if either cannot be written.
    """
    file = path.with_suffix(".lengths.json")
    write_atomically(file, scenario.lengths.model_dump_json(include={"lengths", "has_gradient"}) + "\n")
    lengths = scenario.lengths.model_copy(update={"file": Path(file.name)})
    write_atomically(path, dump_toml(scenario.model_copy(update={"lengths": lengths})))


def rate_tables(scenario: Scenario) -> dict[str, RateTable]:
    """Tables of U(h) of a calibrated scenario, by label: overlapping phases ("at the same time") and "in turns"."""
    sections = {"at the same time": scenario.decode, "in turns": scenario.colocated_decode}
    return {
        label: RateTable(decode.sizes, decode.rates)
        for label, decode in sections.items()
        if isinstance(decode, TableDecodeConfig)
    }


def calibration_text(scenario: Scenario) -> str:
    """Render the tables of a calibrated scenario and its other costs."""
    tables = rate_tables(scenario)
    rates = [dict(zip(table.sizes, table.rates, strict=True)) for table in tables.values()]
    rows = [["", *tables]]
    for size in sorted(set().union(*rates)):
        rows.append([str(size), *(f"{known[size]:,.0f}" if size in known else "-" for known in rates)])
    lines = ["sampled tokens per second, by sequences in flight", text_table(rows)]
    trainings = (scenario.training, scenario.colocated_training or scenario.training)
    delays = (scenario.delays, scenario.colocated_delays or scenario.delays)
    for label, training, section in zip(tables, trainings, delays, strict=True):
        lines += [f"training {label}: {_training_text(training)}", f"delays {label}: {_delays_text(section)}"]
    return "\n".join(lines)


def _devices(recipe: Recipe) -> tuple[int, int]:
    """Devices of the engine and of the trainer while both work: cores on a CPU, else 1 and one per rank."""
    engine, trainer = recipe.engine, recipe.trainer
    of_engine = num_threads(engine.threads, colocated=False) if engine.device == "cpu" else 1
    if trainer.device != "cpu":
        return of_engine, trainer.num_ranks
    if trainer.threads is not None:
        return of_engine, trainer.num_ranks * trainer.threads
    return of_engine, num_threads(None, colocated=False)


def _filter_rate(run: RecordedRun, group_size: int) -> float:
    num_filtered = sum(line["dropped/filtered_groups"] for line in run.lines)
    num_rollouts = sum(len(line["length/by_rollout"]) for line in run.lines)
    return float(num_filtered / max(num_filtered + num_rollouts / group_size, 1))


def _lengths_section(run: RecordedRun, group_size: int) -> ListedLengthsConfig:
    """List the lengths of whole groups, spread evenly over the run, up to the file's limit.

    The list also says which groups have a gradient. Groups with long responses have a gradient more often, and fewer
    groups have one as the policy learns.
    """
    lengths, has_gradient = run.by_rollout("length"), run.by_rollout("has_gradient")
    num_groups = -(-len(lengths) // group_size)
    num_kept = min(num_groups, max(1, _MAX_LENGTHS // group_size))
    starts = [index * num_groups // num_kept * group_size for index in range(num_kept)]
    return ListedLengthsConfig(
        lengths=tuple(max(1, length) for start in starts for length in lengths[start : start + group_size]),
        order="cycled",
        has_gradient=tuple(any(has_gradient[start : start + group_size]) for start in starts),
    )


def _rounded(section: AnySection) -> AnySection:
    return section.model_copy(update={name: _four_digits(value) for name, value in section})


def _four_digits(value: float) -> float:
    """Round to four significant digits, more than a measurement gives."""
    return float(f"{value:.4g}")


def _training_text(training: TrainingConfig) -> str:
    return (
        f"{1e3 * training.time_per_step:.2f} ms per step, {1e6 * training.time_per_token:.1f} us per token on one"
        f" device, {100 * training.without_gradient_fraction:.0f} % of the tokens without a gradient"
    )


def _delays_text(delays: DelaysConfig) -> str:
    return ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in delays.model_dump().items())
