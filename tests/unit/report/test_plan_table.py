"""Plans as text: unknown values are dashes, and large rates are readable."""

from __future__ import annotations

from dataclasses import replace

from midflight.report.plan_table import plan_text
from midflight.sim.costs import RateTable
from midflight.sim.formulas.steady_state import Queue
from midflight.sim.lengths import uniform
from midflight.sim.planner.plan import Goal, make_plan
from midflight.sim.planner.search import search_space
from midflight.sim.workload import Workload

# Times in seconds: one engine samples 20,000 tokens/s.
WORKLOAD = Workload(8, 4, uniform(100), RateTable((1, 16), (2000.0, 20_000.0)), 1e-5, gpus_per_engine=2)


def test_rates_in_tokens_per_second() -> None:
    plan = make_plan(WORKLOAD, WORKLOAD, Goal(), search_space(WORKLOAD, Queue(4)))
    rows = plan_text(plan, "s").splitlines()
    (best,) = (row.split() for row in rows if row.startswith("best"))
    assert best[1:5] == ["3", "16", "2", "60,000"]
    assert rows[0].startswith("rates: trained tokens per s;")


def test_unknown_values_are_dashes() -> None:
    turns = replace(WORKLOAD, num_gpus=9)
    rows = plan_text(make_plan(WORKLOAD, turns, Goal(), search_space(WORKLOAD, Queue(4))), "s").splitlines()
    (best,) = (row.split() for row in rows if row.startswith("best"))
    assert best[-2:] == ["-", "-"]
    assert not any(row.startswith(("largest gain", "as written")) for row in rows)
    assert any(row.startswith("the pipeline is not known to be faster") for row in rows)
