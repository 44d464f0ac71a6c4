"""Recipe -> the processes that a run would start, an estimate of their memory, and the planner's expectation.

Nothing is started, and no weight is read. Results are JSON values, which `report.dry_run` shows as text.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

from midflight.config import Recipe, Scenario
from midflight.config.scenario import ScenarioBatchConfig
from midflight.config.sections import (
    HttpEngineConfig,
    ProcessGroupWeightsConfig,
    SharedMemoryWeightsConfig,
    TrainerConfig,
)
from midflight.launch.build import check_structure, lora_settings, recipe_schedule, reference_device
from midflight.launch.checks import missing_for_checks
from midflight.launch.memory import (
    ModelSizes,
    Parts,
    engine_memory,
    published_memory,
    reference_memory,
    slots_memory,
    trainer_memory,
)
from midflight.launch.objectives import build_objective
from midflight.launch.planning import estimate_scenario
from midflight.launch.simulation import simulate_scenario
from midflight.launch.streams import scoring_workers
from midflight.launch.weights import transport_options
from midflight.metrics.jsonl import finite

# Figures of a simulated run that a real run logs, too, under the same names.
_FIGURES = ("throughput/trained_tokens", "lag/mean", "lag/p95", "lag/max", "idle/trainer_fraction")


def dry_run(recipe: Recipe, scenario: Scenario | None = None, model_config: Path | None = None) -> dict[str, Any]:
    """Return what a run of the recipe would be.

    `scenario`: hardware that the planner assumes; None: no expectation. `model_config`: a config.json, or a directory
    with one; default: the one in model.path, without which there is no estimate of memory.
    Raises: RecipeError, ScenarioError; ModelError if config.json cannot be used.
    """
    check_structure(recipe)
    path = model_config or recipe.model.path
    sizes = None
    if model_config or (path / "config.json").is_file():
        sizes = ModelSizes.of(path, lora_settings(recipe))
    values = {
        "run": recipe.run.name,
        "not_checked": missing_for_checks(recipe),
        "roles": _roles(recipe),
        "model": None if sizes is None else _model_figures(path, sizes),
        "memory": None if sizes is None else _memory(recipe, sizes),
        "expectation": None if scenario is None else expectation(recipe, scenario),
    }
    return cast(dict[str, Any], finite(values))


def _roles(recipe: Recipe) -> list[dict[str, Any]]:
    """Processes by role, in the order of their start. Servers are started by the user."""
    trainer, engine, is_pool = recipe.trainer, recipe.engine, isinstance(recipe.engine, HttpEngineConfig)
    num_workers = recipe.num_preprocess_workers
    preprocesses = "" if num_workers else ", preprocessing"
    roles: list[tuple[str, int | None, str, str]] = [
        ("trainer", trainer.num_ranks, _trainer_devices(trainer), f"trains ({trainer.type})"),
        ("rollout", 1, "cpu" if is_pool else engine.device, f"schedule {recipe.schedule.type}{preprocesses}"),
        ("grader", recipe.task.num_graders, "cpu", f"rewards of {recipe.task.type}"),
    ]
    if num_workers:
        roles.append(("preprocess", num_workers, _reference_device(recipe), "preprocessing"))
    if is_pool:
        roles.append(("server", None, engine.device, "generates; started with `midflight serve ... --join`"))
    return [dict(zip(("role", "processes", "device", "does"), role, strict=True)) for role in roles]


def _trainer_devices(trainer: TrainerConfig) -> str:
    last = trainer.num_ranks - 1
    return trainer.device if trainer.device != "cuda" else "cuda:0" if not last else f"cuda:0 to cuda:{last}"


def _reference_device(recipe: Recipe) -> str:
    if recipe.loss.kl_coefficient is None or recipe.reference.url:
        return "cpu"
    return recipe.preprocess.device or recipe.engine.device


def _model_figures(path: Path, sizes: ModelSizes) -> dict[str, Any]:
    return {
        "config": str(path),
        "parameters": sizes.num_parameters,
        "trained": sizes.num_trained,
        "max_positions": getattr(sizes.config, "max_position_embeddings", None),
    }


def _memory(recipe: Recipe, sizes: ModelSizes) -> dict[str, Any]:
    """Memory of each kind of process, and of each device (bytes)."""
    trainer, engine, is_pool = recipe.trainer, recipe.engine, isinstance(recipe.engine, HttpEngineConfig)
    proximal_every = build_objective(recipe).proximal_every
    parts = trainer_memory(sizes, trainer, recipe.batch.max_tokens, proximal_every not in (None, 1))
    rows: list[tuple[str, str, Parts]] = [
        ("trainer" if trainer.num_ranks == 1 else "trainer, each rank", _device(trainer.device, 0), parts)
    ]
    num_seqs = recipe.serve.num_in_flight if is_pool else recipe_schedule(recipe).max_in_flight
    rows.append(
        (
            "server, each" if is_pool else "engine in rollout",
            "a server's device" if is_pool else _device(engine.device, 0),
            engine_memory(sizes, engine, trainer.dtype, num_seqs, recipe.max_length),
        )
    )
    if isinstance(recipe.weights, SharedMemoryWeightsConfig):
        rows.append(("shared memory", "cpu", {"weights": slots_memory(sizes, trainer)}))
    elif isinstance(recipe.weights, ProcessGroupWeightsConfig) and (sent := transport_options(recipe))["snapshot"]:
        device = _device(trainer.device, 0) if sent["backend"] == "nccl" else "cpu"
        rows.append(("weights being sent", device, {"weights": published_memory(sizes, trainer)}))
    if recipe.loss.kl_coefficient is not None and not recipe.reference.url:
        each = ", each process" if recipe.num_preprocess_workers > 1 else ""
        rows.append((f"reference model{each}", _device(str(reference_device(recipe, 0)), 0), reference_memory(sizes)))
    totals: Counter[str] = Counter()
    for worker in range(1, len(scoring_workers(recipe)) if not recipe.reference.url else 0):
        totals[_device(str(reference_device(recipe, worker)), 0)] += sum(reference_memory(sizes).values())
    for _, device, row in rows:
        totals[device] += sum(row.values())
    for rank in range(1, trainer.num_ranks):
        totals[_device(trainer.device, rank)] += sum(parts.values())
    return {
        "max_tokens_per_microbatch": recipe.batch.max_tokens,
        "sequences_per_engine": num_seqs,
        "tokens_per_sequence": recipe.max_length,
        "processes": [
            {"process": process, "device": device, "parts": row, "total": sum(row.values())}
            for process, device, row in rows
        ],
        "devices": dict(totals),
    }


def _device(device: str, rank: int) -> str:
    return f"cuda:{rank}" if device == "cuda" else device


def expectation(recipe: Recipe, scenario: Scenario) -> dict[str, Any]:
    """Simulate the recipe's schedule and batches on the scenario's hardware and lengths, and apply the formulas to it.

    Raises: ScenarioError naming the key that does not fit.
    """
    batch = ScenarioBatchConfig(
        batch_size=recipe.batch.batch_size,
        group_size=recipe.batch.group_size,
        filter_rate=scenario.batch.filter_rate if recipe.batch.dynamic_sampling else 0.0,
    )
    applied = scenario.model_copy(update={"batch": batch, "schedule": recipe.schedule})
    result, estimate = simulate_scenario(applied), estimate_scenario(applied)
    figures = result.figures()
    num_rollouts = sum(len(step.lengths) for step in result.measured)
    formulas = estimate and {
        "throughput/trained_tokens": estimate.rate,
        "lag/mean": estimate.mean_lag,
        "lag/max": estimate.max_lag,
        "idle/trainer_fraction": 1.0 - estimate.trainer_share,
    }
    return {
        "time_unit": scenario.simulation.time_unit,
        "num_gpus": scenario.cluster.num_gpus,
        "num_engines": scenario.cluster.num_engines,
        "steps": figures["steps"],
        "simulated": {"samples": num_rollouts / result.elapsed, **{name: figures[name] for name in _FIGURES}},
        "formulas": formulas,
    }
