"""Recipe -> destinations of metrics: metrics.jsonl, and the sinks that the recipe lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from midflight.config import Recipe
from midflight.config.run_directory import RunDirectory
from midflight.launch.importing import Joint
from midflight.metrics.jsonl import JsonlWriter
from midflight.metrics.sinks import MetricsSinks
from midflight.protocols import MetricsSink

SINKS: Joint[MetricsSink] = Joint("metrics.sinks", {}, MetricsSink)


def open_sinks(recipe: Recipe, run: RunDirectory, version: int, note: Callable[[str], object]) -> MetricsSinks:
    """Open all sinks; `version` is the version that training starts or resumes from, `note` shows the user a line."""
    return MetricsSinks(JsonlWriter(run.metrics, resume_version=version), _bound(recipe, run.path, version), note)


def check_sinks(recipe: Recipe) -> None:
    """Check the sinks. Raises: RecipeError if a sink cannot be imported or does not take its options."""
    _bound(recipe, Path(), 0)


def _bound(recipe: Recipe, run_directory: Path, version: int) -> list[tuple[str, Callable[[], MetricsSink]]]:
    offered = {"run_directory": run_directory, "version": version}
    return [(sink.type, SINKS.bind(sink.type, offered, sink.options)) for sink in recipe.metrics.sinks]
