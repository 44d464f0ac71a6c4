"""Scenario -> a plan of how to split its GPUs. This module does not import torch."""

from __future__ import annotations

from dataclasses import replace

from midflight.config import Scenario
from midflight.config.schedules import ConventionalConfig, OneStepOffConfig, PipelineConfig, pipeline_capacity
from midflight.errors import ScenarioError
from midflight.launch.scenarios import build_workload
from midflight.sim.formulas.analytic import Estimate, conventional, one_step_off, pipeline
from midflight.sim.formulas.steady_state import Queue
from midflight.sim.planner.plan import Goal, Plan, make_plan
from midflight.sim.planner.search import LagKind, search_space


def plan_scenario(scenario: Scenario, goal: Goal, lag: LagKind, max_in_flight: int | None = None) -> Plan:
    """Return the plan, with an estimate for the scenario's own split, if it has one.

    Raises: ScenarioError naming the key or the bound that cannot be met.
    """
    if scenario.batch.filter_rate:
        raise ScenarioError(
            f"batch.filter_rate = {scenario.batch.filter_rate:g}: the formulas do not model dynamic sampling; 0 would"
            " work, or `midflight simulate`"
        )
    workload = build_workload(scenario, colocated=False)
    space = replace(search_space(workload, _queue(scenario), max_in_flight), lag=lag)
    plan = make_plan(workload, build_workload(scenario, colocated=True), goal, space, estimate_scenario(scenario))
    return replace(plan, notes=(*plan.notes, *_left_out(scenario)))


def estimate_scenario(scenario: Scenario) -> Estimate | None:
    """Return the formulas' estimate for the scenario's own schedule and split.

    None if the scenario has no split, or the formulas do not cover its schedule.
    Raises: ScenarioError naming the wrong key.
    """
    schedule, num_engines = scenario.schedule, scenario.cluster.num_engines
    if scenario.batch.filter_rate:
        return None
    match schedule:
        case ConventionalConfig(num_in_flight=None):
            return conventional(build_workload(scenario, colocated=True), schedule.steps_per_rl_step)
        case OneStepOffConfig(num_in_flight=None) if num_engines:
            return one_step_off(build_workload(scenario, colocated=False), 1, num_engines)
        case PipelineConfig(max_lag=None) if num_engines:
            workload = build_workload(scenario, colocated=False)
            return pipeline(workload, schedule.num_in_flight, num_engines, _queue(scenario))
    return None


def _queue(scenario: Scenario) -> Queue:
    """The queue of the scenario's pipeline, or of the default one, without a hard bound on lag."""
    schedule = scenario.schedule if isinstance(scenario.schedule, PipelineConfig) else PipelineConfig()
    unbounded = schedule.model_copy(update={"max_lag": None})
    return Queue(pipeline_capacity(unbounded, scenario.batch.batch_size), schedule.when_full)


def _left_out(scenario: Scenario) -> list[str]:
    """Notes on parts of the scenario that the formulas do not model."""
    notes: list[str] = []
    if scenario.batch.group_size > 1:
        notes.append(
            f"these figures leave out that rollouts wait for the slowest of their group of {scenario.batch.group_size};"
            " `midflight simulate` includes it"
        )
    if scenario.failures.mean_time_between:
        notes.append("these figures leave out failures of engines; `midflight simulate` includes them")
    return notes
