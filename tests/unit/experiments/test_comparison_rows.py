"""Figures of one run, of all seeds of a schedule, and the table of schedules."""

from __future__ import annotations

from typing import Any

import pytest

from midflight.experiments.accuracy import accuracy_figures
from midflight.experiments.comparison_rows import combine_seeds, comparison_table, curve, run_figures


def summary(**values: Any) -> dict[str, Any]:
    return {
        "train_wall_s": 20.0,
        "rollout_s": 16.0,
        "steps": 100,
        "samples": 3200,
        "trained_tokens": 64_000,
        "max_lag": 9,
        "mean_lag": 2.5,
        "mean_ess": 0.9987,
        "idle": {"generation": 0.05, "trainer": 0.25},
        "carried_token_fraction": 0.125,
        "old_token_fraction": 0.75,
        "padding_fraction": 0.0,
        "update_pause_s": 0.001,
        "length_bias": {"ks": 0.0625, "mean_generated": 19.0, "mean_trained": 18.0, "mean_dropped": 30.0},
        "dropped": {"filtered": 2, "queue_full": 1},
        "versions_per_rollout_max": 6,
        "groups": {"started": 420, "trained": 400, "dropped": 3, "failed": 1, "unfinished": 16},
        **values,
    }


def make_run(seed: int = 0, reached: dict[str, float | None] | None = None, **values: Any) -> dict[str, Any]:
    figures = run_figures(summary(**values), steps(20), reached_at(reached or {}))
    return {"schedule": "april", "seed": seed, "run_directory": f"/runs/{seed}", **figures, "curve": []}


def reached_at(seconds: dict[str, float | None]) -> dict[str, Any]:
    figures = accuracy_figures([], lambda _: 0.0)
    return {**figures, "seconds_to_accuracy": {**figures["seconds_to_accuracy"], **seconds}}


def adds_up(groups: dict[str, int]) -> bool:
    return groups["started"] == groups["trained"] + groups["dropped"] + groups["failed"] + groups["unfinished"]


def test_rates_are_per_second_of_the_run_and_of_rollouts() -> None:
    figures = run_figures(summary(), steps(20), reached_at({}))
    assert figures["trained_samples_per_s"] == 160.0
    assert figures["trained_tokens_per_s"] == 3200.0
    assert figures["trained_tokens_per_rollout_s"] == 4000.0
    assert figures["length_ks"] == 0.0625
    assert figures["final_reward"] == 0.5  # of the last two of twenty steps
    assert run_figures(summary(rollout_s=0.0), [], reached_at({}))["trained_tokens_per_rollout_s"] is None


def test_the_row_of_one_run_has_its_figures() -> None:
    run = make_run(reached={"0.8": 4.0, "0.85": 5.0, "0.9": None})
    row = combine_seeds([run])
    assert row == {key: run[key] for key in run if key not in ("seed", "run_directory", "curve")}
    assert next(iter(row)) == "schedule"
    assert isinstance(row["max_lag"], int)


def test_rows_hold_medians_of_nested_figures() -> None:
    runs = [
        make_run(0, mean_lag=1.0, idle={"generation": 0.1, "trainer": 0.9}, mean_ess=None),
        make_run(1, mean_lag=7.0, idle={"generation": 0.2, "trainer": 0.5}, mean_ess=0.5),
        make_run(2, mean_lag=2.0, idle={"generation": 0.6, "trainer": None}, mean_ess=0.75),
    ]
    row = combine_seeds(runs)
    assert row["mean_lag"] == 2.0
    assert row["idle"] == {"generation": 0.2, "trainer": pytest.approx(0.7)}
    assert row["mean_ess"] == 0.625
    assert combine_seeds([make_run(mean_ess=None)])["mean_ess"] is None


def test_groups_are_summed_so_that_they_add_up() -> None:
    groups = [
        {"started": 10, "trained": 1, "dropped": 2, "failed": 3, "unfinished": 4},
        {"started": 30, "trained": 27, "dropped": 0, "failed": 1, "unfinished": 2},
        {"started": 50, "trained": 20, "dropped": 28, "failed": 0, "unfinished": 2},
    ]
    dropped = [{"filtered": 2, "queue_full": 0}, {"filtered": 0, "queue_full": 0}, {"filtered": 8, "queue_full": 20}]
    runs = [make_run(seed, groups=groups[seed], dropped=dropped[seed]) for seed in range(3)]
    row = combine_seeds(runs)
    assert row["groups"] == {"started": 90, "trained": 48, "dropped": 30, "failed": 4, "unfinished": 8}
    assert adds_up(row["groups"])
    assert row["dropped"] == {"filtered": 10, "queue_full": 20}


def test_a_level_that_the_median_run_never_reached_is_null() -> None:
    runs = [
        make_run(0, {"0.8": 3.0, "0.85": None, "0.9": None}),
        make_run(1, {"0.8": None, "0.85": 9.0, "0.9": None}),
        make_run(2, {"0.8": 5.0, "0.85": None, "0.9": None}),
    ]
    assert combine_seeds(runs)["seconds_to_accuracy"] == {"0.8": 5.0, "0.85": None, "0.9": None}


def steps(num_steps: int) -> list[dict[str, Any]]:
    return [
        {"version": step, "wall_s": 0.5 * step, "samples": 32 * step, "reward/mean": float(step % 2)}
        for step in range(1, num_steps + 1)
    ]


def test_a_short_curve_has_every_step() -> None:
    points = curve(steps(200))
    assert len(points) == 200
    assert points[0] == {"wall_s": 0.5, "samples": 32, "reward": 1.0}


def test_a_long_curve_is_averaged_over_windows_and_ends_with_the_run() -> None:
    points = curve(steps(1001))
    assert 150 < len(points) <= 200
    assert points[0] == {"wall_s": 3.0, "samples": 192, "reward": 0.5}
    assert points[-1] == {"wall_s": 500.5, "samples": 32 * 1001, "reward": pytest.approx(3 / 5)}


def test_steps_without_a_reward_are_not_on_the_curve() -> None:
    lines = steps(4)
    lines[2]["reward/mean"] = None
    assert [point["samples"] for point in curve(lines)] == [32, 64, 128]
    assert curve([]) == []


def test_the_table_has_a_column_per_schedule() -> None:
    long = {**make_run(reached={"0.8": 4.25, "0.85": 5.0, "0.9": None}), "schedule": "conventional:steps_per_rl_step=4"}
    bare = make_run(mean_ess=None, length_bias={"ks": None}, idle={"generation": None, "trainer": 0.5})
    header, *lines = comparison_table([combine_seeds([long]), combine_seeds([bare])]).splitlines()
    assert header.split() == ["conventional:steps_per_rl_step=4", "april"]
    assert {len(line) for line in lines} == {len(header)}
    table = {title: cells for title, *cells in (line.split("  ", 1) for line in lines)}
    cells = {title: " ".join(rest[0].split()) for title, rest in table.items()}
    assert cells["trained samples a second"] == "160.0 160.0"
    assert cells["seconds to accuracy 0.8"] == "4.2 -"
    assert cells["seconds to accuracy 0.9"] == "- -"
    assert cells["generation idle"] == "5.0 % -"
    assert cells["effective sample size"] == "0.9987 -"
    assert cells["tokens carried over"] == "12.5 % 12.5 %"
    assert cells["weight update, ms"] == "1.00 1.00"
    assert cells["groups dropped"] == "3 3"
    assert cells["reward at the end"] == "0.500 0.500"
