"""Terminal output of a run: the live view, plain lines without a terminal, and the summary."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from midflight.report.progress import LiveView, failure_warning, print_summary

Line = dict[str, Any]


def line(version: int, **values: Any) -> Line:
    return {
        "version": version,
        "wall_s": 0.5 * version,
        "samples": 32 * version,
        "reward/mean": 0.75,
        "throughput/generated_tokens_per_s": 12_345.0,
        "throughput/trained_tokens_per_s": 9_876.0,
        "in_flight": 61.0,
        "lag/mean": 3.2,
        "lag/max": 7.0,
        "ess": 0.9876,
        "update/pause_s": 0.0042,
        "idle/generation_fraction": 0.02,
        "idle/trainer_fraction": 0.11,
        "time/step_s": 0.5,
        **values,
    }


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120)


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rendered(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(view.render())
    return output(console)


def shown_on_terminal(*lines: Line, max_steps: int = 100) -> str:
    view = LiveView(max_steps, terminal())
    view.update(lines)
    return rendered(view)


@pytest.mark.parametrize(
    "figure",
    [
        "step 40 of 100",
        "0:20 so far",
        "0:30 left",
        "0.750",
        "1,280 samples",
        "12,345 tokens/s",
        "9,876 tokens/s",
        "61 in flight",
        "lag 3.2 mean, 7 max",
        "ESS 0.9876",
        "4.2 ms",
        "idle 2 %",
        "idle 11 %",
    ],
)
def test_the_live_view_shows(figure: str) -> None:
    assert figure in shown_on_terminal(*(line(version) for version in range(1, 41)))


def test_noisy_figures_are_averaged_over_the_last_steps() -> None:
    old = [line(version, **{"lag/mean": 50.0, "lag/max": 99.0}) for version in range(1, 21)]
    new = [line(version, **{"lag/mean": 1.0 + version % 2, "lag/max": 4.0}) for version in range(21, 41)]
    assert "lag 1.5 mean, 4 max" in shown_on_terminal(*old, *new)


def test_rates_are_averaged_over_time() -> None:
    """A second at 1,000 tokens/s and a millisecond at 1,000,000 are 2,000 tokens in 1.001 s."""
    key = "throughput/trained_tokens_per_s"
    slow = line(1, **{key: 1_000.0, "time/step_s": 1.0, "idle/trainer_fraction": 0.5})
    text = shown_on_terminal(slow, line(2, **{key: 1e6, "time/step_s": 0.001, "idle/trainer_fraction": 0.0}))
    assert "1,998 tokens/s" in text
    assert "idle 50 %" in text


def test_the_sparkline_rises_with_the_reward() -> None:
    text = shown_on_terminal(*(line(version, **{"reward/mean": version / 40}) for version in range(1, 41)))
    (sparks,) = re.findall("[▁▂▃▄▅▆▇█]+", text)
    assert list(sparks) == sorted(sparks)
    assert (sparks[0], sparks[-1]) == ("▁", "█")


def test_missing_metrics_are_no_error() -> None:
    """A step without an update has no pause, and a step without a gradient has no ESS; null means not a number."""
    incomplete = line(2, ess=None, **{"reward/mean": None})
    del incomplete["update/pause_s"], incomplete["lag/mean"]
    text = shown_on_terminal(line(1), incomplete)
    assert "ESS 0.9876" in text
    assert "4.2 ms" in text


def test_steps_repeated_after_a_resume_replace_the_old_ones() -> None:
    view = LiveView(100, terminal())
    view.update([line(version, **{"reward/mean": 0.9, "wall_s": 10.0 * version}) for version in range(1, 31)])
    view.update([line(version, **{"reward/mean": 0.1, "wall_s": 1.0 * version}) for version in range(1, 11)])
    text = rendered(view)
    assert "step 10 of 100" in text
    assert "0.100" in text
    assert "1:30 left" in text
    assert re.findall("[▁▂▃▄▅▆▇█]+", text) == ["▁" * 10]


def test_a_terminal_is_redrawn_and_ends_with_one_plain_line() -> None:
    console = terminal()
    with LiveView(3, console) as view:
        view.update([line(1)])
        view.update([line(2), line(3)])
    assert "step 2" not in output(console).splitlines()[-1]
    assert "step 3/3" in output(console).splitlines()[-1]


def test_without_a_terminal_lines_are_printed_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("midflight.report.progress.time.monotonic", lambda: now[0])
    console = pipe()
    with LiveView(100, console) as view:
        for version in range(1, 41):
            view.update([line(version)])
            now[0] += 0.5
    lines = output(console).splitlines()
    assert [text.split()[1] for text in lines] == ["1/100", "11/100", "21/100", "31/100", "40/100"]
    for figure in ("reward 0.750", "samples 1,280", "12,345", "9,876", "lag 3.2 (max 7)", "ESS 0.9876", "0:30"):
        assert figure in lines[-1]
    assert "\x1b" not in output(console)


def test_failed_groups_are_shown_during_the_run() -> None:
    console = pipe()
    with LiveView(10, console) as view:
        view.update([line(1), line(2, **{"dropped/failed_groups": 3.0})])
    assert "3 groups failed in 2 steps" in output(console)


def test_a_run_that_ends_before_its_first_step_shows_nothing() -> None:
    console = pipe()
    with LiveView(10, console) as view:
        view.update([])
    assert output(console) == ""


# --- the summary ------------------------------------------------------------------------------------------------


def evaluation(sampled: float, **values: Any) -> dict[str, Any]:
    return {
        "num_problems": 512,
        "sampled_accuracy": sampled,
        "greedy_accuracy": sampled + 0.0125,
        "sampled_accuracy_by_difficulty": {"2": sampled + 0.02, "5-8": sampled - 0.05},
        "hard_from": 5,
        "num_hard_problems": 200,
        "sampled_accuracy_hard": sampled - 0.0625,
        "mean_length": 20.0,
        "sets": {"held_out": {"samples": 1}, "sums": {"samples": 4, "avg": {"value": sampled, "standard_error": 0.01}}},
        **values,
    }


def summary(**values: Any) -> dict[str, Any]:
    return {
        "run_directory": "/home/somebody/" + "a_long_directory_name/" * 5 + "run-1",
        "eval_before": evaluation(0.3),
        "eval_after": evaluation(0.9),
        "evaluations": {"scores": {"0": 0.3, "20": 0.8, "40": 0.7}, "best_version": 20, "generated_tokens": 4_321},
        "train_wall_s": 50.0,
        "steps": 400,
        "skipped_steps": 0,
        "samples": 12_800,
        "generated_tokens": 300_000,
        "trained_tokens": 250_000,
        "updates": 399,
        "aborted": 0,
        "versions_per_rollout_max": 12,
        "max_lag": 11,
        "mean_lag": 2.99,
        "mean_ess": 0.9971,
        "update_pause_s": 0.00065,
        "idle": {"generation": 0.0072, "trainer": 0.1102},
        "carried_token_fraction": 0.0321,
        "old_token_fraction": 0.9867,
        "length_bias": {"ks": 0.0104, "mean_generated": 19.24, "mean_trained": 18.96, "mean_dropped": 44.0},
        "clipped_fraction": 0.1234,
        "dropped": {"filtered": 2, "queue_full": 1},
        "groups": {"started": 1612, "trained": 1600, "dropped": 3, "failed": 1, "unfinished": 8},
        "failures": {"ValueError: not [a number] (task.py:7)": 1},
        "restarts": {"trainer": 2, "rollout": 1},
        **values,
    }


def printed(values: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_summary(values, console)
    return output(console)


def row(text: str, title: str) -> str:
    (line,) = [line for line in text.splitlines() if re.match(rf"│ *(accuracy, sampled, )?{re.escape(title)}", line)]
    return line


@pytest.mark.parametrize(
    ("title", "figures"),
    [
        ("accuracy, sampled, on 512", ["0.300 -> 0.900"]),
        ("accuracy, greedy", ["0.312 -> 0.912"]),
        ("difficulty 5 and more", ["0.237 -> 0.838"]),
        ("difficulty 2 ", ["0.320 -> 0.920"]),
        ("difficulty 5-8", ["0.250 -> 0.850"]),
        ("sums, avg@4", ["0.300 ± 0.010 -> 0.900 ± 0.010"]),
        ("evaluations", ["3 versions", "4,321 tokens", "best is version 20 with 0.800"]),
        ("training", ["50.0 s", "400 steps", "12,800 samples"]),
        ("generated", ["300,000 tokens", "6,000 a second"]),
        ("trained ", ["250,000 tokens", "5,000 a second"]),
        ("weight updates", ["399", "0.65 ms", "0 aborts"]),
        ("versions in one rollout", ["12"]),
        ("lag", ["2.99 mean", "11 max"]),
        ("effective sample size", ["0.9971"]),
        ("idle", ["0.0072", "0.1102"]),
        ("tokens of older weights", ["98.7 %", "carried over 3.2 %"]),
        ("process restarts", ["2 trainer, 1 rollout"]),
        ("length", ["19.2 generated", "19.0 trained", "44.0 dropped", "bias 0.0104"]),
        ("cut off at max_tokens", ["12.3 % of the responses"]),
        ("dropped", ["2 without signal", "1 because of a full queue"]),
        ("failed groups", ["most often (1 of 1) by ValueError: not [a number] (task.py:7)"]),
        ("groups", ["1612 started", "1600 trained", "3 dropped", "1 failed", "8 unfinished"]),
    ],
)
def test_the_summary_shows(title: str, figures: list[str]) -> None:
    text = row(printed(summary()), title)
    for figure in figures:
        assert figure in text


def test_the_run_directory_is_printed_on_one_line() -> None:
    assert printed(summary()).splitlines()[-1] == summary()["run_directory"]


def test_a_summary_without_evaluations_has_no_accuracy() -> None:
    text = printed(summary(eval_before=None, eval_after=None))
    assert "accuracy" not in text
    assert "400 steps" in text


def test_sets_are_shown_without_held_out_problems() -> None:
    text = printed(summary(eval_before=evaluation(0.3, num_problems=0), eval_after=evaluation(0.9, num_problems=0)))
    assert "accuracy" not in text
    assert "0.300 ± 0.010 -> 0.900 ± 0.010" in row(text, "sums, avg@4")


def test_an_evaluation_during_the_run_is_shown_until_the_next() -> None:
    figures = {"eval/version": 20.0, "eval/sums/avg@4": 0.625, "eval/sums/avg@4_error": 0.02}
    lines = shown_on_terminal(line(1), line(2, **figures), line(3)).splitlines()
    (evaluated,) = [each for each in lines if "evaluated" in each]
    assert re.search(r"version 20 +sums/avg@4 0\.625 +│", evaluated)


def test_one_evaluation_is_shown_without_the_other() -> None:
    assert "- -> 0.900" in row(printed(summary(eval_before=None)), "accuracy, sampled, on 512")
    assert "0.300 -> -" in row(printed(summary(eval_after=None)), "accuracy, sampled, on 512")


def test_evaluations_of_different_problems_are_shown_side_by_side() -> None:
    """A resumed run may evaluate on more problems, with difficulties that the first evaluation did not have."""
    few = evaluation(0.3, num_problems=2, sampled_accuracy_hard=None, sampled_accuracy_by_difficulty={"2": 0.5})
    text = printed(summary(eval_before=few))
    assert "- -> 0.850" in row(text, "difficulty 5-8")
    assert "- -> 0.838" in row(text, "difficulty 5 and more")


def test_a_run_without_a_step_has_a_summary() -> None:
    values = summary(
        steps=0, train_wall_s=0.0, samples=0, mean_ess=None, update_pause_s=None, generated_tokens=0, trained_tokens=0
    )
    values |= {"old_token_fraction": 0.0, "carried_token_fraction": 0.0}
    values |= {
        "clipped_fraction": None,
        "length_bias": {"ks": None, "mean_generated": None, "mean_trained": None, "mean_dropped": None},
    }
    text = printed(values | {"idle": {"generation": None, "trainer": None}})
    assert "- (mean tokens), bias -" in row(text, "length")
    assert row(text, "effective sample size").split()[-2] == "-"
    assert "generation -, trainer -" in text


def test_dropped_groups_are_only_mentioned_if_there_were_any() -> None:
    text = printed(summary(dropped={"filtered": 0, "queue_full": 0}))
    assert "without signal" not in text


def test_many_failed_groups_are_a_warning_with_the_reason() -> None:
    counts = {"started": 88, "trained": 20, "dropped": 2, "failed": 64, "unfinished": 2}
    values = summary(groups=counts, failures={"ValueError: x (task.py:7)": 60, "too slow": 4})
    warning = failure_warning(values)
    assert warning is not None
    assert warning.startswith(
        "warning: 64 of 86 groups failed and were not trained on, most often (60 of 64) by ValueError: x (task.py:7);"
    )
    assert failure_warning(summary()) is None
    assert failure_warning(summary(groups=counts | {"trained": 0, "dropped": 0, "failed": 0})) is None


def test_skipped_steps_are_only_mentioned_if_there_were_any() -> None:
    assert "skipped" not in printed(summary())
    assert "2 (loss not finite)" in row(printed(summary(skipped_steps=2)), "skipped steps")
