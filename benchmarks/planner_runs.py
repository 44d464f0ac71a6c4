"""Plans and simulated runs behind the pictures of docs/planner.md, see planner_figures.py.

Rates are in tokens per unit of the scenario's time, lags in optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.collation import CollationGain, collation_gain
from benchmarks.restart_baseline import restart_baseline
from midflight.config import Scenario, load_scenario
from midflight.launch.planning import estimate_scenario, plan_scenario
from midflight.launch.simulation import build_run, simulate_scenario
from midflight.sim.costs import PAPER_STEP_COST
from midflight.sim.formulas.analytic import Estimate
from midflight.sim.formulas.draining import Draining
from midflight.sim.lengths import LengthDistribution
from midflight.sim.planner.plan import Goal, Plan
from midflight.sim.simulator.result import SimulationResult

SCENARIOS = Path(__file__).parents[1] / "scenarios"

Numbers = dict[str, Any]


def paper(*overrides: str) -> Scenario:
    """Load the case study with 1000 optimizer steps, of which the first 400 are a warm-up."""
    steps = ("simulation.num_steps=1000", "simulation.num_warm_up_steps=400")
    return load_scenario(SCENARIOS / "paper.toml", (*steps, *overrides))


def paper_in_turns(steps_per_rl_step: int, num_steps: int, *overrides: str) -> Scenario:
    """Load the same GPUs under conventional RL, without a warm-up: every RL step is like the first."""
    schedule = ("schedule.type=conventional", f"schedule.steps_per_rl_step={steps_per_rl_step}")
    return paper(*schedule, f"simulation.num_steps={num_steps}", "simulation.num_warm_up_steps=0", *overrides)


def paper_plan(*overrides: str, max_lag: int | None = None) -> Plan:
    return plan_scenario(paper(*overrides), Goal(max_lag), "corrected")


def speed_point(max_lag: int) -> Numbers:
    """Simulate the split that is planned for this lag, and conventional RL with the same lag."""
    split = paper_plan(max_lag=max_lag).best.split
    scenarios = (paper(*_keys(split)), paper_in_turns(max_lag + 1, 400))
    runs = [simulate_scenario(scenario) for scenario in scenarios]
    beside = [beside_formula(run, scenario) for run, scenario in zip(runs, scenarios, strict=True)]
    return {
        "max_lag": max_lag,
        "num_engines": split.num_engines,
        "num_in_flight": split.num_in_flight,
        "pipeline": beside[0],
        "conventional": beside[1],
        "speed_up": {
            "simulated": runs[0].rate / runs[1].rate,
            "formula": beside[0]["formula"]["rate"] / beside[1]["formula"]["rate"],
        },
    }


def bounded_point(max_lag: int) -> Numbers:
    """Simulate the case study's split under a hard bound, beside the split planned for this lag without a bound."""
    split = paper_plan(max_lag=max_lag).best.split
    steps = ("simulation.num_steps=400", "simulation.num_warm_up_steps=200")
    return {
        "max_lag": max_lag,
        "bounded": figures(simulate_scenario(paper(*steps, f"schedule.max_lag={max_lag}"))),
        "planned": {"rate": split.rate, "mean_lag": split.mean_lag},
    }


def scaled_decoding(factor: float) -> Numbers:
    """Plan for a max lag of 132 with all decoding rates multiplied by `factor`."""
    table = [round(factor * rate, 6) for rate in PAPER_STEP_COST.rates]
    keys = ("decode.type=table", "decode.pad_to=64", "decode.beyond=hold")
    sizes = f"decode.sizes={list(PAPER_STEP_COST.sizes)}"
    best = paper_plan(*keys, sizes, f"decode.rates={table}", max_lag=132).best
    return {"factor": factor, "speed_up": best.speed_up, "max_lag": best.max_lag}


def over_sampled(over_sampling: float, slope: float) -> list[SimulationResult]:
    """Simulate APRIL with a step time of 1 + `slope` h; three seeds, as one seed is some percent off."""
    return _april_runs(f"schedule.over_sampling={over_sampling}", f"decode.per_sequence={slope}")


def dynamic_sampling(filter_rate: float) -> Numbers:
    """Simulate the gain of twofold over-sampling if `filter_rate` of the groups is filtered."""
    keys = (f"batch.filter_rate={filter_rate}", "schedule.refill=over_sampled")
    runs = _april_runs(*keys)
    alone = restart_baseline(build_run(_april(*keys)), range(1000, 1400))
    return {
        "filter_rate": filter_rate,
        "gain_trained": mean(run.rate for run in runs) / alone.rate,
        "gain_generated": mean(run.generated_rate for run in runs) / alone.generated_rate,
        "thrown_away_without_april": alone.thrown_away_fraction,
    }


def decode_rate(batch: Draining) -> float:
    """Mean tokens per unit of time of a draining batch."""
    return float(batch.active.sum()) / batch.duration


def share_below(batch: Draining, num_active: float) -> float:
    """Share of the time with fewer than `num_active` sequences in flight."""
    below = batch.active < num_active * (1 - 1e-9)
    return float(batch.times[below].sum()) / batch.duration


def share_until_half(batch: Draining) -> float:
    """Share of the time until half of the sequences have ended."""
    return 1 - share_below(batch, float(batch.active[0]) / 2)


def collated(lengths: LengthDistribution, max_tokens: int) -> Numbers:
    """Collate 512 sequences into microbatches; return means of twelve draws."""
    rng = np.random.default_rng(0)
    gains = [collation_gain(lengths.draw(rng, 0, 1, 512)[0].tolist(), max_tokens) for _ in range(12)]

    def mean_of(figure: Callable[[CollationGain], float]) -> float:
        return mean(figure(gain) for gain in gains)

    return {
        "microbatches_in_order": mean_of(lambda gain: gain.in_order.num_microbatches),
        "microbatches_greedy": mean_of(lambda gain: gain.greedy.num_microbatches),
        "padding_in_order": mean_of(lambda gain: gain.in_order.padding_fraction),
        "padding_greedy": mean_of(lambda gain: gain.greedy.padding_fraction),
        "fewer_microbatches": mean_of(lambda gain: gain.fewer_microbatches),
    }


def figures(run: SimulationResult) -> Numbers:
    return {
        "rate": run.rate,
        "mean_lag": float(run.mean_lags.mean()),
        "median_max_lag": float(np.median(run.max_lags)),
        "max_lag": int(run.max_lags.max()),
        "trainer_share": run.trainer_share,
    }


def beside_formula(run: SimulationResult, scenario: Scenario) -> Numbers:
    estimate = estimate_scenario(scenario)
    assert estimate is not None, "the formulas know this schedule"
    names = ("rate", "mean_lag", "max_lag", "trainer_share")
    return {"simulated": figures(run), "formula": {name: getattr(estimate, name) for name in names}}


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _keys(split: Estimate) -> tuple[str, str]:
    return f"cluster.num_engines={split.num_engines}", f"schedule.num_in_flight={split.num_in_flight}"


def _april(*overrides: str) -> Scenario:
    steps = ("simulation.num_steps=140", "simulation.num_warm_up_steps=20")
    return load_scenario(SCENARIOS / "april.toml", (*steps, *overrides))


def _april_runs(*overrides: str) -> list[SimulationResult]:
    return [simulate_scenario(_april(f"simulation.seed={seed}", *overrides)) for seed in range(3)]
