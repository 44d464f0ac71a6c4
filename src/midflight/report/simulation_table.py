"""A simulated run as text and as JSON."""

from __future__ import annotations

from typing import Any, cast

from midflight.metrics.jsonl import finite
from midflight.report.text_table import text_table
from midflight.sim.formulas.analytic import Estimate
from midflight.sim.simulator.result import SimulationResult, TrainedBatch


def simulation_text(result: SimulationResult, estimate: Estimate | None, time_unit: str) -> str:
    """Return a table of the simulated figures beside the figures of the formulas, if there is an estimate."""
    figures, formulas = result.figures(), _formula_figures(estimate)
    rows = [["", "simulated", "formulas"]]
    for name, label in _LABELS.items():
        rows.append([label.format(unit=time_unit), _number(figures[name]), _number(formulas.get(name))])
    steps, time = figures["steps"], _number(figures["time"])
    return f"{text_table(rows)}\nover {steps} optimizer steps, {time} {time_unit} on the virtual clock"


def simulation_json(result: SimulationResult, estimate: Estimate | None, with_rollouts: bool = False) -> dict[str, Any]:
    """Return the simulated run as JSON values. Numbers that are not finite are null."""
    values: dict[str, Any] = {
        "figures": result.figures(),
        "formulas": _formula_figures(estimate) or None,
        "batches": [_batch_json(batch, with_rollouts) for batch in result.measured],
    }
    return cast(dict[str, Any], finite(values))


def _batch_json(batch: TrainedBatch, with_rollouts: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "version": batch.index,
        "start": batch.start,
        "end": batch.end,
        "trained_tokens": batch.num_tokens,
        "lag/mean": batch.mean_lag,
        "lag/max": batch.max_lag,
    }
    if with_rollouts:
        values |= {
            "rollouts": batch.rollout_ids.tolist(),
            "lengths": batch.lengths.tolist(),
            "first_lags": batch.first_lags.tolist(),
            "last_lags": batch.last_lags.tolist(),
        }
    return values


def _formula_figures(estimate: Estimate | None) -> dict[str, float]:
    """Figures of the formulas, under the names of the simulated figures."""
    if estimate is None:
        return {}
    return {
        "throughput/trained_tokens": estimate.rate,
        "idle/trainer_fraction": 1.0 - estimate.trainer_share,
        "lag/mean": estimate.mean_lag,
        "lag/max": estimate.max_lag,
    }


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


_LABELS = {
    "throughput/trained_tokens": "trained tokens per {unit}",
    "throughput/generated_tokens": "generated tokens per {unit}",
    "lag/mean": "lag, mean (optimizer steps)",
    "lag/p95": "lag, 95 % of tokens",
    "lag/max": "lag, max",
    "lag/max_of_batch_median": "lag, median of the batches' max",
    "lag/last_token": "lag of last tokens, mean",
    "old_token_fraction": "tokens of older weights, share",
    "versions_per_rollout/max": "weight versions in one rollout, max",
    "carried_token_fraction": "tokens from before an interruption, share",
    "discarded_token_fraction": "tokens never trained on, share",
    "idle/generation_fraction": "generation idle, share",
    "idle/trainer_fraction": "trainer idle, share",
}
