"""evaluations.jsonl: one JSON object per evaluation of a run, in order of weight versions.

The rollout process appends the evaluations during training; the supervisor appends those before and after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midflight.metrics.jsonl import JsonlWriter, MetricsLine, read_metrics


def read_evaluations(path: Path) -> list[MetricsLine]:
    """Return the complete evaluations; [] if there is no file. Raises: RunDirectoryError if a line is damaged."""
    return read_metrics(path) if path.exists() else []


def append_evaluation(path: Path, version: int, line: Mapping[str, Any]) -> None:
    """Append the evaluation of a version, replacing one of the same version and removing those of later ones."""
    with JsonlWriter(path, resume_version=version - 1) as writer:
        writer.write({"version": version, **line})


def forget_later(path: Path, version: int) -> None:
    """Remove the evaluations of versions after `version`, whose weights are made again, and an incomplete line."""
    JsonlWriter(path, resume_version=version).close()


def best_version(evaluations: Sequence[MetricsLine]) -> int | None:
    """Version with the highest avg@k on the first set, the newest of equal ones; None without such a figure.

    The model before training does not count: it has no checkpoint.
    """
    scores = [(score_of(line), line["version"]) for line in evaluations if line["version"] > 0]
    known = [(score, version) for score, version in scores if score is not None]
    return max(known)[1] if known else None


def score_of(evaluation: MetricsLine) -> float | None:
    """Return avg@k on the first set of an evaluation, or None."""
    first: dict[str, Any] = next(iter(evaluation["sets"].values()), {})
    value: float | None = (first.get("avg") or {}).get("value")
    return value


def metrics_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Figures of an evaluation as `eval/<set>/<figure>`, for the metrics line of the next optimizer step."""
    metrics: dict[str, float] = {}
    for name, result in evaluation["sets"].items():
        k = result["samples"]
        estimates = {f"avg@{k}": result["avg"], f"maj@{k}": result["maj"]}
        estimates |= {f"pass@{attempts}": value for attempts, value in (result["pass_at"] or {}).items()}
        for figure, estimate in estimates.items():
            if estimate:
                metrics[f"eval/{name}/{figure}"] = estimate["value"]
                if estimate["standard_error"] is not None:
                    metrics[f"eval/{name}/{figure}_error"] = estimate["standard_error"]
        for figure in ("mean_length", "truncated_fraction"):
            if result[figure] is not None:
                metrics[f"eval/{name}/{figure}"] = result[figure]
    return metrics
