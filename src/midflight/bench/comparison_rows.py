"""The figures of runs that are compared: of one run, of all seeds of a schedule, and all of them as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from midflight.bench.accuracy import LEVELS, SecondsToAccuracy
from midflight.metrics.jsonl import MetricsLine

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
_OF_ONE_RUN = {"schedule", "seed", "run_directory", "curve"}
_SUMMED = {"groups", "dropped"}  # so that they still add up
_NUM_CURVE_POINTS = 200


def run_figures(summary: Figures, reached: SecondsToAccuracy) -> Figures:
    """What a row says, of one run.

    Units: rates are per second of the run's clock; `trained_tokens_per_rollout_s` per second that generation was not
    waiting for training; `update_pause_s`, `train_wall_s` and `seconds_to_accuracy` are in seconds.
    """
    wall_s = summary["train_wall_s"]
    return {
        "trained_samples_per_s": _rate(summary["samples"], wall_s),
        "trained_tokens_per_s": _rate(summary["trained_tokens"], wall_s),
        "trained_tokens_per_rollout_s": _rate(summary["trained_tokens"], summary["rollout_s"]),
        **{key: summary[key] for key in _FROM_SUMMARY},
        "length_ks": summary["length_bias"]["ks"],
        "seconds_to_accuracy": reached,
    }


def curve(lines: Sequence[MetricsLine]) -> list[dict[str, float]]:
    """Reward against seconds and samples: at most 200 means over windows of steps, each placed at its last step."""
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
    """The row of a schedule from its runs: medians, but sums where groups are counted.

    Figures that a run does not have are left out of a median. A level of accuracy that the median run never reached
    has None.
    """
    figures = [key for key in runs[0] if key not in _OF_ONE_RUN]
    combined = {key: _combine([run[key] for run in runs], _how(key)) for key in figures}
    return {"schedule": runs[0]["schedule"], **combined}


def comparison_table(rows: Sequence[Figures]) -> str:
    """One line per schedule; `-` where there is no such figure."""
    table = [["schedule", *_COLUMNS], *([row["schedule"], *(cell(row) for cell in _COLUMNS.values())] for row in rows)]
    first, *widths = (max(map(len, column)) for column in zip(*table, strict=True))
    return "\n".join(
        name.ljust(first) + "".join(cell.rjust(width + 3) for cell, width in zip(cells, widths, strict=True))
        for name, *cells in table
    )


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _how(key: str) -> Callable[[Sequence[Any]], Any]:
    if key in _SUMMED:
        return sum
    return _median_reached if key == "seconds_to_accuracy" else _median


def _combine(values: Sequence[Any], how: Callable[[Sequence[Any]], Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _combine([value[name] for value in values], how) for name in values[0]}
    return how(values)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _median_reached(values: Sequence[float | None]) -> float | None:
    median = statistics.median(math.inf if value is None else value for value in values)
    return median if math.isfinite(median) else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _reached_column(level: str) -> Callable[[Figures], str]:
    return lambda row: _number(row["seconds_to_accuracy"][level], 1)


_COLUMNS: dict[str, Callable[[Figures], str]] = {
    "samples/s": lambda row: _number(row["trained_samples_per_s"], 1),
    "tokens/s": lambda row: _number(row["trained_tokens_per_s"], 0),
    "tokens/rollout s": lambda row: _number(row["trained_tokens_per_rollout_s"], 0),
    "mean lag": lambda row: _number(row["mean_lag"], 2),
    "max lag": lambda row: f"{row['max_lag']:g}",
    "ESS": lambda row: _number(row["mean_ess"], 4),
    "generation idle": lambda row: _percent(row["idle"]["generation"]),
    "trainer idle": lambda row: _percent(row["idle"]["trainer"]),
    "length KS": lambda row: _number(row["length_ks"], 3),
    "dropped": lambda row: str(sum(row["dropped"].values())),
    **{f"s to {level}": _reached_column(str(level)) for level in LEVELS},
}
