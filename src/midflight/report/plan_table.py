"""A plan as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

from midflight.metrics.jsonl import finite
from midflight.report.text_table import text_table
from midflight.sim.formulas.analytic import Estimate
from midflight.sim.planner.plan import Choice, Plan

_TITLES = ("engines", "in flight", "training GPUs", "rate", "max lag", "mean lag", "trainer busy", "conventional")


def plan_text(plan: Plan, time_unit: str) -> str:
    """Two tables as text: the named choices, and the Pareto front by max lag."""
    lag = "the paper's figure" if plan.lag == "paper" else "with training, delays and waiting"
    named = {"best": plan.best, "roomier": plan.roomy, "largest gain": plan.largest_gain, "as written": plan.as_written}
    rows: list[list[object]] = [
        ["", *_TITLES, "speed-up"],
        *([name, *_choice_cells(choice)] for name, choice in named.items() if choice),
    ]
    if plan.one_step_off:
        rows.append(["one-step-off", *_cells(plan.one_step_off, plan.one_step_off.max_lag), "", ""])
    table = text_table([*rows, *(["", *_choice_cells(row)] for row in plan.rows)]).splitlines()
    return "\n".join(
        [
            f"rates: trained tokens per {time_unit}; lags: optimizer steps, max lag {lag};"
            " conventional: its rate at the same max lag",
            *table[: len(rows)],
            "\nfastest by max lag",
            *table[len(rows) :],
            f"\n{_crossover_line(plan)}",
            *(f"note: {note}" for note in plan.notes),
        ]
    )


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values. Unknown numbers and numbers that are not finite are null."""
    named = ("best", "roomy", "largest_gain", "as_written")
    values = {
        "lag": plan.lag,
        **{name: _choice_json(getattr(plan, name)) for name in named},
        "one_step_off": _estimate_json(plan.one_step_off),
        "first_win": plan.first_win,
        "crossover": plan.crossover,
        "front": [_choice_json(row) for row in plan.rows],
        "curve": {
            "max_lag": plan.curve.lags.tolist(),
            "rate": plan.curve.rates.tolist(),
            "conventional_rate": plan.curve.conventional_rates.tolist(),
        },
        "notes": plan.notes,
    }
    return cast(dict[str, Any], finite(values))


def _choice_cells(choice: Choice) -> list[object]:
    conventional_rate = _rate(choice.conventional.rate) if choice.conventional else "-"
    speed_up = f"{choice.speed_up:.3f}" if choice.speed_up is not None else "-"
    return [*_cells(choice.split, choice.max_lag), conventional_rate, speed_up]


def _cells(estimate: Estimate, max_lag: float) -> list[object]:
    split = [estimate.num_engines, estimate.num_in_flight or "a batch", estimate.num_training_gpus]
    return [*split, _rate(estimate.rate), max_lag, f"{estimate.mean_lag:.4g}", f"{estimate.trainer_share:.0%}"]


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _crossover_line(plan: Plan) -> str:
    formula = f" ({plan.crossover:.1f} by the formula for low lags)" if plan.crossover is not None else ""
    if plan.first_win is None:
        return f"the pipeline is not known to be faster than conventional RL at any max lag{formula}"
    return f"the pipeline is faster than conventional RL from a max lag of {plan.first_win} on{formula}"


def _choice_json(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    comparison = {"conventional": _estimate_json(choice.conventional), "speed_up": choice.speed_up}
    return {**asdict(choice.split), "max_lag": choice.max_lag, **comparison}


def _estimate_json(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else {**asdict(estimate), "max_lag": estimate.max_lag}
