"""Figures of compared runs: of one run, of all seeds of a variant, and of all variants as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from midflight.experiments.accuracy import LEVELS
from midflight.metrics.jsonl import MetricsLine
from midflight.report.text_table import text_table

Figures = dict[str, Any]

_FROM_SUMMARY = (
    "max_lag",
    "mean_lag",
    "mean_ess",
    "idle",
    "carried_token_fraction",
    "old_token_fraction",
    "padding_fraction",
    "update_pause_s",
    "dropped",
    "versions_per_rollout_max",
    "steps",
    "samples",
    "train_wall_s",
    "groups",
)
_LABELS = ("schedule", "loss")  # the sections that can be compared
_NOT_COMBINED = {*_LABELS, "seed", "run_directory", "curve"}
_SUMMED = {"groups", "dropped"}  # medians of these counts would not add up
_NUM_CURVE_POINTS = 200


def run_figures(summary: Figures, lines: Sequence[MetricsLine], accuracy: Figures) -> Figures:
    """Return the figures of one run, from its summary and its metrics.

    `accuracy` is the result of `accuracy_figures`; `final_reward` is the mean over the last tenth of the steps.
    Units: rates are per second of the run's clock, `trained_tokens_per_rollout_s` per second in which generation did
    not wait for training; `update_pause_s`, `train_wall_s` and `seconds_to_accuracy` are in seconds.
    """
    wall_s = summary["train_wall_s"]
    return {
        "trained_samples_per_s": _rate(summary["samples"], wall_s),
        "trained_tokens_per_s": _rate(summary["trained_tokens"], wall_s),
        "trained_tokens_per_rollout_s": _rate(summary["trained_tokens"], summary["rollout_s"]),
        **{key: summary[key] for key in _FROM_SUMMARY},
        "length_ks": summary["length_bias"]["ks"],
        "final_reward": _final_reward(lines),
        **accuracy,
    }


def curve(lines: Sequence[MetricsLine]) -> list[dict[str, float]]:
    """Reward over seconds and samples: at most 200 means over windows of steps, each placed at its last step."""
    steps = [line for line in lines if line["reward/mean"] is not None]
    size = max(1, math.ceil(len(steps) / _NUM_CURVE_POINTS))
    windows = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [
        {
            "wall_s": window[-1]["wall_s"],
            "samples": window[-1]["samples"],
            "reward": statistics.fmean(line["reward/mean"] for line in window),
        }
        for window in windows
    ]


def combine_seeds(runs: Sequence[Figures]) -> Figures:
    """Combine the runs of a variant into its row: medians, and sums for the counts of groups.

    Medians ignore missing figures. A level of accuracy that the median run never reached is None.
    """
    figures = [key for key in runs[0] if key not in _NOT_COMBINED]
    combined = {key: _combine([run[key] for run in runs], _reduction(key)) for key in figures}
    return {**{key: runs[0][key] for key in _LABELS if key in runs[0]}, **combined}


def label(run_or_row: Figures) -> str:
    """Return the variant of a run or row, as the user typed it."""
    return next(str(run_or_row[key]) for key in _LABELS if key in run_or_row)


def comparison_table(rows: Sequence[Figures]) -> str:
    """Return a table with a column per variant and a line per figure; `-` for a missing figure."""
    return text_table(
        [["", *map(label, rows)], *([title, *(_cell(row, *line) for row in rows)] for title, line in _LINES.items())]
    )


def _final_reward(lines: Sequence[MetricsLine]) -> float | None:
    rewards = [line["reward/mean"] for line in lines if line["reward/mean"] is not None]
    return statistics.fmean(rewards[-math.ceil(len(rewards) / 10) :]) if rewards else None


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _reduction(key: str) -> Callable[[Sequence[Any]], Any]:
    if key in _SUMMED:
        return sum
    return _median_reached if key.endswith("_to_accuracy") else _median


def _combine(values: Sequence[Any], reduce: Callable[[Sequence[Any]], Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _combine([value[name] for value in values], reduce) for name in values[0]}
    return reduce(values)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _median_reached(values: Sequence[float | None]) -> float | None:
    median = statistics.median(math.inf if value is None else value for value in values)
    return median if math.isfinite(median) else None


def _cell(row: Figures, path: str, form: int | str) -> str:
    """Format one figure of a row. `form` is a number of decimals, "%" for fractions, or "ms" for seconds."""
    value: Any = row
    for key in path.split("/"):
        value = value[key]
    if isinstance(value, dict):
        value = sum(value.values())
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if form == "%" else f"{1e3 * value:.2f}" if form == "ms" else f"{value:,.{form}f}"


_LINES: dict[str, tuple[str, int | str]] = {
    "trained samples a second": ("trained_samples_per_s", 1),
    "trained tokens a second": ("trained_tokens_per_s", 0),
    "trained tokens a second of rollout": ("trained_tokens_per_rollout_s", 0),
    **{f"seconds to accuracy {level}": (f"seconds_to_accuracy/{level}", 1) for level in LEVELS},
    **{f"steps to accuracy {level}": (f"steps_to_accuracy/{level}", 0) for level in LEVELS},
    "accuracy at the end": ("final_accuracy", 3),
    "reward at the end": ("final_reward", 3),
    "samples": ("samples", 0),
    "seconds": ("train_wall_s", 1),
    "generation idle": ("idle/generation", "%"),
    "trainer idle": ("idle/trainer", "%"),
    "lag, mean": ("mean_lag", 2),
    "lag, max": ("max_lag", 0),
    "versions in a rollout, max": ("versions_per_rollout_max", 0),
    "effective sample size": ("mean_ess", 4),
    "tokens of older weights": ("old_token_fraction", "%"),
    "tokens carried over": ("carried_token_fraction", "%"),
    "padding": ("padding_fraction", "%"),
    "weight update, ms": ("update_pause_s", "ms"),
    "length bias, KS": ("length_ks", 3),
    "groups dropped": ("dropped", 0),
    "groups failed": ("groups/failed", 0),
}
