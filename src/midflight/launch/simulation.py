"""Scenario -> a run on a virtual clock. This module does not import torch."""

from __future__ import annotations

from midflight.config import Scenario
from midflight.config.scenario import ListedLengthsConfig
from midflight.config.schedules import ConventionalConfig, PipelineConfig
from midflight.errors import ScenarioError
from midflight.launch.scenarios import build_lengths, build_workload, scenario_schedule, training_of
from midflight.sim.costs import StepCost
from midflight.sim.simulator.failures import Failures
from midflight.sim.simulator.groups import Gradients
from midflight.sim.simulator.result import SimulationResult
from midflight.sim.simulator.simulation import Delays, SimulatedRun, simulate


def simulate_scenario(scenario: Scenario) -> SimulationResult:
    """Return the result after the warm-up steps. Raises: ScenarioError naming the wrong key."""
    num_warm_up_steps = _in_rl_steps(scenario, scenario.simulation.num_warm_up_steps)
    return simulate(build_run(scenario)).after(num_warm_up_steps)


def build_run(scenario: Scenario) -> SimulatedRun:
    schedule, lengths, failures = scenario_schedule(scenario), scenario.lengths, scenario.failures
    workload = build_workload(scenario, schedule.colocated)
    training = training_of(scenario, schedule.colocated)
    _check_in_flight(scenario, workload.step_cost)
    if schedule.colocated:
        num_engines, num_training = workload.num_colocated_engines, workload.num_gpus
    else:
        num_engines = _num_engines(scenario)
        workload.check_num_engines(num_engines)
        num_training = workload.num_gpus - num_engines * workload.gpus_per_engine
    has_gradient = lengths.has_gradient if isinstance(lengths, ListedLengthsConfig) else None
    seed = scenario.simulation.seed
    return SimulatedRun(
        schedule=schedule,
        lengths=build_lengths(lengths),
        step_cost=workload.step_cost,
        num_engines=num_engines,
        batch_size=workload.batch_size,
        num_steps=_in_rl_steps(scenario, scenario.simulation.num_steps),
        train_time_per_token=training.time_per_token / num_training,
        train_time_per_step=training.time_per_step,
        group_size=scenario.batch.group_size,
        filter_rate=scenario.batch.filter_rate,
        gradients=Gradients(training.without_gradient_fraction, has_gradient),
        delays=Delays(workload.transfer, workload.preprocess, workload.update_pause, workload.handover_pause),
        failures=Failures(failures.mean_time_between, failures.repair_time, seed),
        seed=seed,
    )


def _in_rl_steps(scenario: Scenario, num_steps: int) -> int:
    """Round up to whole RL steps, so that a period generates and trains the same tokens."""
    steps_per_rl_step = scenario.schedule.steps_per_rl_step if isinstance(scenario.schedule, ConventionalConfig) else 1
    return -(-num_steps // steps_per_rl_step) * steps_per_rl_step


def _check_in_flight(scenario: Scenario, cost: StepCost) -> None:
    """Check the size of the table of decode rates; only the pipeline's load per engine is known in advance."""
    if isinstance(scenario.schedule, PipelineConfig) and scenario.schedule.num_in_flight > cost.max_in_flight:
        raise ScenarioError(
            f"schedule.num_in_flight = {scenario.schedule.num_in_flight} is beyond decode.sizes, which end at"
            f" {cost.max_in_flight:g}; fewer rollouts, a longer table, or decode.beyond = 'hold' would work"
        )


def _num_engines(scenario: Scenario) -> int:
    if scenario.cluster.num_engines is None:
        raise ScenarioError(
            f"cluster.num_engines is missing: schedule.type = {scenario.schedule.type!r} generates and trains at the"
            " same time; `midflight plan` finds the best number"
        )
    return scenario.cluster.num_engines
