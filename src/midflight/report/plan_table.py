"""A plan for people, and for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

from midflight.metrics.jsonl import finite
from midflight.sim.formulas.analytic import Estimate
from midflight.sim.planner.plan import Choice, Plan

_HEADER = (
    f"{'':14}{'engines':>8}{'in flight':>11}{'training GPUs':>15}{'rate':>13}{'max lag':>9}{'mean lag':>10}"
    f"{'trainer busy':>14}{'conventional':>14}{'speed-up':>10}"
)


def plan_text(plan: Plan, time_unit: str) -> str:
    """Tables: what there is to choose from, and the front by max lag."""
    lag = "the paper's figure" if plan.lag == "paper" else "with training, delays and waiting"
    named = [
        ("best", plan.best),
        ("roomier", plan.roomy),
        ("largest gain", plan.largest_gain),
        ("as written", plan.as_written),
    ]
    lines = [
        f"rates: trained tokens per {time_unit}; lags: optimizer steps, max lag {lag};"
        " conventional: its rate at the same max lag",
        _HEADER,
        *(_row(name, each) for name, each in named if each),
        *([_cells("one-step-off", plan.one_step_off, plan.one_step_off.max_lag)] if plan.one_step_off else []),
        "",
        "fastest by max lag",
        *(_row("", row) for row in plan.rows),
        "",
        _crossover_line(plan),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def plan_json(plan: Plan) -> dict[str, Any]:
    """Numbers that are not finite, or not known, are null."""
    values = {
        "lag": plan.lag,
        "best": _choice_json(plan.best),
        "roomy": _choice_json(plan.roomy),
        "largest_gain": _choice_json(plan.largest_gain),
        "as_written": _choice_json(plan.as_written),
        "one_step_off": _estimate_json(plan.one_step_off) if plan.one_step_off else None,
        "first_win": plan.first_win,
        "crossover": plan.crossover,
        "front": [_choice_json(row) for row in plan.rows],
        "curve": {
            "max_lag": plan.curve.lags.tolist(),
            "rate": plan.curve.rates.tolist(),
            "conventional_rate": plan.curve.conventional_rates.tolist(),
        },
        "notes": list(plan.notes),
    }
    return cast(dict[str, Any], finite(values))


def _row(name: str, choice: Choice) -> str:
    beside = _rate(choice.conventional.rate) if choice.conventional else "-"
    speed_up = f"{choice.speed_up:.3f}" if choice.speed_up is not None else "-"
    return f"{_cells(name, choice.split, choice.max_lag)}{beside:>14}{speed_up:>10}"


def _cells(name: str, estimate: Estimate, max_lag: float) -> str:
    in_flight = estimate.num_in_flight or "a batch"
    return (
        f"{name:14}{estimate.num_engines:>8}{in_flight:>11}{estimate.num_training_gpus:>15}{_rate(estimate.rate):>13}"
        f"{max_lag:>9}{estimate.mean_lag:>10.4g}{estimate.trainer_share:>14.0%}"
    )


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _crossover_line(plan: Plan) -> str:
    formula = f" ({plan.crossover:.1f} by the formula for low lags)" if plan.crossover is not None else ""
    if plan.first_win is None:
        return f"the pipeline is nowhere known to be faster than conventional RL at the same max lag{formula}"
    return f"the pipeline is faster than conventional RL from a max lag of {plan.first_win} on{formula}"


def _choice_json(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    conventional = choice.conventional
    return {
        **_estimate_json(choice.split),
        "max_lag": choice.max_lag,
        "conventional": _estimate_json(conventional) if conventional else None,
        "speed_up": choice.speed_up,
    }


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    return {**asdict(estimate), "max_lag": estimate.max_lag}
