"""Calibration recovers the costs behind a trace, and refuses runs that it cannot measure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midflight import cli
from midflight.config import SHIPPED_RECIPES, Scenario, dump_toml, load_recipe, load_scenario
from midflight.config.scenario import ListedLengthsConfig, TableDecodeConfig
from midflight.config.schedules import PipelineConfig
from midflight.errors import BenchmarkError, RecipeError
from midflight.launch.scenarios import build_lengths, build_step_cost
from midflight.sim.calibration import measure
from midflight.sim.calibration.measure import (
    Iteration,
    PlannedRun,
    RecordedRun,
    colocated_delays,
    fit_table,
    fit_training,
    iterations_of,
    planned_runs,
    slots_per_token,
    split_delays,
)
from midflight.sim.calibration.scenario import calibrate, calibration_text, scenario_of, write_scenario
from midflight.tracing.spans import SpanRecord
from narrowing import instance, present

RECIPE = SHIPPED_RECIPES["cpu_demo"]
MS = 1_000_000  # nanoseconds


def step_ms(rows: int) -> float:
    """Duration of an iteration in these traces: linear, so that a table with enough sizes is exact."""
    return 1.0 + 0.05 * rows


def decode(start_ms: float, rows: int, took_ms: float) -> SpanRecord:
    return ("decode", round(start_ms * MS), round((start_ms + took_ms) * MS), {"num_seqs": rows})


def span(name: str, start_ms: float, end_ms: float, **arguments: int) -> SpanRecord:
    return (name, round(start_ms * MS), round(end_ms * MS), arguments)


def line(
    lengths: Sequence[int], computed: int, busy_s: float, idle_s: float = 0.0, ungraded: int = 0
) -> dict[str, Any]:
    elapsed = busy_s + idle_s
    return {
        "length/by_rollout": [*lengths], "has_gradient/by_rollout": [0] * 8 + [1] * (len(lengths) - 8),
        "lag/tokens_by_lag": [computed, 0], "time/step_s": elapsed,
        "idle/trainer_fraction": idle_s / elapsed, "idle/generation_fraction": 0.0,
        "queue/ungraded_rollouts": float(ungraded), "dropped/filtered_groups": 0.0,
    }  # fmt: skip


# --- decoding ---------------------------------------------------------------------------------------------------


def test_iteration_lasts_until_the_next_one_without_delays() -> None:
    spans = [
        decode(0, 4, 1), span("save", 1, 2), decode(3, 4, 1),
        span("update", 4, 6), span("hand_over", 6, 7, batch=0), decode(8, 5, 1),
        span("wait", 9, 29), decode(29, 6, 1), decode(31, 6, 1),
    ]  # fmt: skip
    iterations = iterations_of(spans)
    assert [step.seconds for step in iterations] == pytest.approx([3e-3, 2e-3, 1e-3, 2e-3])
    assert [(step.num_seqs, step.num_new) for step in iterations] == [(4, 4), (4, 0), (5, 1), (6, 1)]


def test_step_that_only_continues_an_update_is_no_iteration() -> None:
    (iteration,) = iterations_of([decode(0, 0, 1), decode(2, 3, 1), decode(4, 3, 1)])
    assert (iteration.num_seqs, iteration.num_new) == (3, 3)
    assert iteration.seconds == pytest.approx(2e-3)


def test_slots_without_a_token_are_counted() -> None:
    spans = [decode(0, 4, 1), decode(2, 6, 1), span("save", 3, 4)]
    assert slots_per_token(spans, num_tokens=8) == pytest.approx(10 / 8)
    assert slots_per_token(spans, num_tokens=12) == 1.0, "more than one token per slot is a miscount"


def test_table_recovers_step_times_and_their_sum() -> None:
    rows = np.random.default_rng(0).integers(1, 49, 3000).tolist()
    iterations = [Iteration(count, step_ms(count) / 1e3) for count in rows]
    table = fit_table(iterations)
    assert table.sizes == (1, 2, 4, 8, 16, 32, 48)
    for size, rate in zip(table.sizes, table.rates, strict=True):
        assert size / rate == pytest.approx(step_ms(size) / 1e3, rel=1e-3)
    total_s = sum(step.num_seqs / rate_at(table, step.num_seqs) for step in iterations)
    assert total_s == pytest.approx(sum(step.seconds for step in iterations), rel=1e-3)


def test_admission_cost_is_spread_over_tokens() -> None:
    iterations: list[Iteration] = []
    for _ in range(200):  # phases: 32 admitted at once, two end at each step
        iterations += [Iteration(rows, (step_ms(rows) + 0.3 * new) / 1e3, new) for rows, new in _phase(32, step=2)]
    mean_length = sum(step.num_seqs for step in iterations) / (200 * 32)
    table = fit_table(iterations, mean_length)
    for size, rate in zip(table.sizes, table.rates, strict=True):
        expected_ms = step_ms(size) + 0.3 / mean_length * size
        assert size / rate == pytest.approx(expected_ms / 1e3, rel=1e-3)
    assert sum(step.num_seqs / rate_at(table, step.num_seqs) for step in iterations) == pytest.approx(
        sum(step.seconds for step in iterations), rel=1e-3
    )


def test_noise_never_makes_a_table_decrease() -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(1, 65, 400).tolist()
    iterations = [Iteration(count, rng.gamma(2.0, 0.5) / 1e3) for count in rows]  # duration independent of the load
    table = fit_table(iterations)
    assert all(after >= before for before, after in itertools.pairwise(table.rates))
    times = [size / rate for size, rate in zip(table.sizes, table.rates, strict=True)]
    assert all(after >= before * (1 - 1e-3) for before, after in itertools.pairwise(times))


def test_rare_sizes_are_left_out() -> None:
    iterations = [Iteration(64, 4e-3)] * 500 + [Iteration(3, 1e-3)] * 5
    assert fit_table(iterations).sizes == (64,)
    with pytest.raises(BenchmarkError, match="only 5 decode steps"):
        fit_table(iterations[-5:])


def _phase(rows: int, step: int) -> list[tuple[int, int]]:
    """List (rows, newly admitted) of each iteration of a phase."""
    return [(left, rows if left == rows else 0) for left in range(rows, 0, -step)]


def rate_at(table: Any, rows: int) -> float:
    times = np.array(table.sizes) / np.array(table.rates)
    return float(rows / np.interp(rows, table.sizes, times))


# --- training and delays ----------------------------------------------------------------------------------------


def test_training_fit_recovers_step_and_token_costs() -> None:
    rng = np.random.default_rng(2)
    lines = []
    for _ in range(100):
        lengths = rng.integers(10, 100, 32).tolist()
        computed = sum(lengths[: 8 * rng.integers(0, 5)])
        lines.append(line(lengths, computed, 0.004 + 0.0001 * computed, idle_s=rng.random()))
    trained = sum(sum(metrics["length/by_rollout"]) for metrics in lines)
    computed = sum(metrics["lag/tokens_by_lag"][0] for metrics in lines)
    cost = fit_training(lines)
    assert cost.time_per_step == pytest.approx(0.004)
    assert cost.time_per_token == pytest.approx(0.0001)
    assert cost.without_gradient_fraction == pytest.approx(1 - computed / trained)


def test_fitted_costs_are_never_negative() -> None:
    falling = fit_training([line([10], 10, 0.3), line([20], 20, 0.2), line([30], 30, 0.1)])
    assert falling.time_per_step == pytest.approx(0.2)
    assert falling.time_per_token == 0.0
    steep = fit_training([line([10], 10, 0.01), line([20], 20, 0.2)])
    assert (steep.time_per_step, steep.time_per_token) == pytest.approx((0.0, 0.105 / 15))
    no_gradient = fit_training([line([10], 0, 0.1), line([20], 0, 0.1)])
    assert (no_gradient.time_per_token, no_gradient.without_gradient_fraction) == (0.0, 1.0)
    with pytest.raises(BenchmarkError, match="only 1 optimizer steps"):
        fit_training([line([10], 10, 0.1)])


def test_delays_of_overlapping_phases() -> None:
    rollout = [
        span("hand_over", 10, 12, batch=0), decode(12, 4, 2), span("hand_over", 30, 34, batch=1),
        span("update", 47, 48), span("update", 97, 100), span("hand_over", 110, 112, batch=2),
    ]  # fmt: skip
    trainer = [
        span("wait", 0, 15), span("train", 15, 40, version=0), span("publish", 40, 42),
        span("wait", 43, 44), span("train", 44, 88, version=1), span("publish", 88, 90),
        span("wait", 91, 117), span("train", 117, 130, version=2), span("publish", 130, 131),
    ]  # fmt: skip
    # 87 ms of training in three steps; each step has 1 ms of bookkeeping on top.
    lines = [line([8] * 8, 64, 30e-3, ungraded=2) for _ in range(3)]
    delays = split_delays(rollout, trainer, lines, mean_iteration_s=4e-3)
    adopted_ms = (47 - 42 + 97 - 90) / 2
    assert delays.transfer == pytest.approx((adopted_ms - 1 - 4 / 2) / 1e3)
    assert delays.update_pause == pytest.approx(2e-3)
    assert delays.handover_pause == pytest.approx((2 + 4 + 2) / 3 / 1e3)
    waited_ms = (15 - 10 + 117 - 110) / 2  # the trainer was busy when the second batch arrived
    grading_s = 2 / (8 / 30e-3)
    assert delays.preprocess == pytest.approx(waited_ms / 1e3 + grading_s)


def test_delays_of_phases_in_turns() -> None:
    rollout = [decode(0, 2, 9), decode(10, 1, 9), decode(60, 2, 9), decode(70, 0, 1)]
    trainer = [
        span("train", 24, 40, version=0), span("publish", 40, 42), span("train", 43, 50, version=1),
        span("publish", 50, 51), span("train", 76, 90, version=2), span("publish", 90, 91),
    ]  # fmt: skip
    lines = [line([8], 8, 41 / 3 / 1e3) for _ in range(3)]  # equal to their spans
    delays = colocated_delays(rollout, trainer, lines)
    assert delays.preprocess == pytest.approx(((24 - 19) + (76 - 69)) / 2 / 1e3)
    assert delays.transfer == pytest.approx((60 - 51) / 1e3)
    assert (delays.update_pause, delays.handover_pause) == (0.0, 0.0)


# --- scenario ---------------------------------------------------------------------------------------------------


def recorded(plan: PlannedRun, group_size: int = 8) -> RecordedRun:
    """Build a run of 30 steps, whose responses at step n all have n + 1 tokens."""
    rows = [4, 16, 64, 128] * 60
    ends = np.cumsum([step_ms(count) for count in rows])
    rollout = [decode(end - step_ms(count), count, step_ms(count)) for end, count in zip(ends, rows, strict=True)]
    lines = [line([1 + step] * 32, 32, 0.05 + 0.001 * step) for step in range(30)]
    trainer = [span("train", 50 * step, 50 * step + 40, version=step) for step in range(30)]
    return RecordedRun(plan, lines, rollout, trainer, iterations_of(rollout, slots_per_token=1.25))


def tables_of(scenario: Scenario) -> list[TableDecodeConfig]:
    """Decode tables of both ways of sharing the machine."""
    return [instance(table, TableDecodeConfig) for table in (scenario.decode, scenario.colocated_decode)]


def test_scenario_file_loads_with_siblings_side_by_side(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, ["engine.threads=2", "trainer.threads=3"])
    scenario = scenario_of(recipe, [recorded(plan) for plan in planned_runs(recipe)])
    path = tmp_path / "scenario.toml"
    path.write_text(dump_toml(scenario))
    assert load_scenario(path) == scenario
    write_scenario(path, scenario)
    assert "has_gradient" not in path.read_text()
    from_two_files = load_scenario(path).lengths
    assert from_two_files.model_copy(update={"file": None}) == scenario.lengths
    assert scenario.schedule == recipe.schedule
    assert (scenario.cluster.num_gpus, scenario.cluster.num_engines) == (5, 1)
    tables = tables_of(scenario)
    assert [table.gpus_per_engine for table in tables] == [2, 5]
    cost = build_step_cost(scenario.decode)
    assert float(cost.step_times(64)) == pytest.approx(1.25 * step_ms(64) / 1e3, rel=0.01)
    lengths = build_lengths(scenario.lengths).draw(np.random.default_rng(0), 0, 120, 8)
    assert (lengths == lengths[:, :1]).all()
    assert lengths[:, 0].tolist() == [1 + group // 4 for group in range(120)]
    assert instance(scenario.lengths, ListedLengthsConfig).has_gradient == (False, True, True, True) * 30


def test_long_run_is_sampled_by_whole_groups() -> None:
    recipe = load_recipe(RECIPE)
    runs = [recorded(plan) for plan in planned_runs(recipe)]
    runs[0].all_lines.extend([line([100 + step] * 32, 32, 0.05) for step in range(4000)])
    listed = instance(scenario_of(recipe, runs).lengths, ListedLengthsConfig)
    assert len(listed.lengths) == 65_536
    assert len(present(listed.has_gradient)) == 65_536 // 8
    assert listed.lengths[0] == 1
    assert listed.lengths[-1] >= 4098
    assert all(len(set(listed.lengths[start : start + 8])) == 1 for start in range(0, 65_536, 8))


def test_short_run_without_a_result_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories: list[Path] = []

    def record(
        plan: PlannedRun, recipe: Path, overrides: Sequence[str], seconds: float, directory: Path
    ) -> RecordedRun:
        directories.append(directory)
        assert seconds == (48.0 if plan.is_long else 6.0)
        if plan.is_long:
            return recorded(plan)
        raise BenchmarkError("too short")

    monkeypatch.setattr(measure, "record", record)
    said: list[str] = []
    scenario, figures = calibrate(RECIPE, [], 48.0, tmp_path / "runs", said.append)
    assert {directory.parent for directory in directories} == {tmp_path / "runs"}
    assert said.count("  left out: too short") == len(directories) - 2
    assert [run["name"] for run in figures["runs"]] == ["at-once", "in-turns"]
    assert figures["decode"] == scenario.decode.model_dump(mode="json")
    assert figures["lengths"] == {"mean": 15.5, "max": 30, "listed": 30 * 32}
    json.dumps(figures)


def test_text_shows_both_tables_and_all_costs() -> None:
    recipe = load_recipe(RECIPE)
    scenario = scenario_of(recipe, [recorded(plan) for plan in planned_runs(recipe)])
    text = calibration_text(scenario)
    at_64 = next(row for row in text.splitlines() if row.startswith("64"))
    assert at_64.split() == ["64", *(f"{table.rates[-2]:,.0f}" for table in tables_of(scenario))]
    assert text.count("ms per step") == text.count("handover_pause") == 2


@pytest.mark.parametrize("kind", ["pipeline", "conventional", "bounded", "april"])
def test_long_runs_cover_both_kinds_and_the_recipes_schedule(kind: str) -> None:
    recipe = load_recipe(RECIPE, [f"schedule.type={kind}"])
    plans = planned_runs(recipe)
    long = [plan for plan in plans if plan.is_long]
    assert [plan.colocated for plan in long] == [False, True]
    assert plans[0] is long[0], "costs come from the first run"
    schedules = [load_recipe(RECIPE, [f"schedule.type={kind}", *plan.overrides]).schedule for plan in plans]
    assert recipe.schedule in schedules
    for plan, schedule in zip(plans, schedules, strict=True):
        assert plan.colocated == (schedule.type in ("conventional", "april"))
    assert len({plan.name for plan in plans}) == len(plans)


def test_short_runs_ignore_the_recipes_bounds() -> None:
    overrides = ["schedule.max_lag=3", "schedule.num_in_flight=16"]
    plans = planned_runs(load_recipe(RECIPE, overrides))
    short = [plan for plan in plans if "in-flight" in plan.name]
    dropping = [instance(load_recipe(RECIPE, [*overrides, *plan.overrides]).schedule, PipelineConfig) for plan in short]
    assert [schedule.num_in_flight for schedule in dropping] == [4, 32]
    assert all(schedule.max_lag is None and schedule.when_full == "drop_oldest" for schedule in dropping)


@pytest.mark.parametrize(
    ("overrides", "seconds", "message"),
    [
        ([], 0.0, "--seconds: should be greater than 0, got 0"),
        ([], float("nan"), "--seconds: should be greater than 0"),
        (["engine.type=http"], 60.0, "engine.type = 'http'"),
        (["trainer.max_steps=3"], 60.0, "in a calibration, --seconds sets trainer.max_steps"),
        (["run.directory=x"], 60.0, "--out-runs sets run.directory"),
    ],
)
def test_unmeasurable_calibration_is_refused(overrides: list[str], seconds: float, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        calibrate(RECIPE, overrides, seconds, None, print)


def test_too_short_run_advises_more_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(recipe: Path, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
        (directory / "logs").mkdir(parents=True)
        (directory / "metrics.jsonl").write_text(json.dumps(line([1], 1, 0.1)) + "\n")
        for role in ("rollout", "trainer"):
            (directory / "logs" / f"{role}.spans.jsonl").write_text("")
        return {}

    monkeypatch.setattr(measure, "train", short)
    with pytest.raises(BenchmarkError, match=r"at-once made 1 optimizer steps in 1 s.*use a longer --seconds"):
        calibrate(RECIPE, [], 1.0, tmp_path / "runs", print)


def test_bad_option_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["midflight", "calibrate", str(RECIPE), "--seconds", "-1"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "midflight: --seconds: should be greater than 0, got -1\n"
