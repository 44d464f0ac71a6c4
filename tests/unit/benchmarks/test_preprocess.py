"""Figures of the preprocessing benchmark, from made-up traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.preprocess import PreprocessLoad, measured, targets_of

from midflight.config.run_directory import RunDirectory
from midflight.errors import BenchmarkError, RecipeError
from midflight.tracing.spans import SpanRecord, Tracer

S = 10**9  # nanoseconds


def span(name: str, start_s: float, end_s: float, **arguments: int) -> SpanRecord:
    return (name, round(start_s * S), round(end_s * S), arguments)


def run_with(path: Path, **spans: list[SpanRecord]) -> RunDirectory:
    run = RunDirectory(path)
    (path / "logs").mkdir()
    for role, of_role in spans.items():
        with Tracer(run.spans(role.replace("_", "-")), role) as tracer:
            for name, start, end, arguments in of_role:
                tracer.add(name, start, end, **arguments)
    lines: list[dict[str, Any]] = [
        {"length/by_rollout": [4] * 8, "time/preprocess_s": seconds} for seconds in (9.0, 0.5, 1.5)
    ]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


TRAINER = [span("train", 0, 10), span("wait", 10, 15), span("train", 15, 20), span("train", 25, 30)]


def test_idle_time_is_outside_decoding_and_updates(tmp_path: Path) -> None:
    rollout = [
        span("decode", 0, 12, num_seqs=3),
        span("update", 11, 14),  # overlaps with decoding
        span("send", 14.5, 15, group=2),
        span("wait", 15, 17),
        span("decode", 17, 29, num_seqs=5),
        span("decode", 29, 32, num_seqs=7),  # ends after the window
    ]
    run = run_with(
        tmp_path, trainer=TRAINER, rollout=rollout, preprocess=[], preprocess_1=[span("score", 16, 18, group=2)]
    )
    row = measured(run, num_workers=2)
    assert row["seconds"] == pytest.approx(20)
    assert row["idle_share"] == pytest.approx((3 + 0) / 20)
    assert row["wait_share"] == pytest.approx(2 / 20)
    assert row["decoded_tokens_per_s"] == pytest.approx(8 / 20)
    assert row["tokens_per_decoding_s"] == pytest.approx(8 / 15)
    assert row["trained_samples_per_s"] == pytest.approx(16 / 20)
    assert row["preprocess_s"] == pytest.approx(1.0)
    assert (row["score_s"], row["scored_groups"]) == (pytest.approx(2), 1)
    assert row["scored_after_s"] == pytest.approx(18 - 14.5)


def test_scoring_in_the_rollout_process_is_idle_time(tmp_path: Path) -> None:
    rollout = [
        span("decode", 0, 15, num_seqs=4),
        span("score", 15, 20, group=0),
        span("decode", 20, 30, num_seqs=4),
    ]
    row = measured(run_with(tmp_path, trainer=TRAINER, rollout=rollout), num_workers=0)
    assert row["idle_share"] == row["scoring_share"] == pytest.approx(5 / 20)
    assert row["scored_after_s"] is None
    assert targets_of([{"num_workers": 0, **row}]) == [], "generation stands still without workers"
    (target,) = targets_of([{"num_workers": 1, **row}])
    assert target["holds"] is False


def test_unusable_runs_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="fewer than 2 optimizer steps"):
        measured(run_with(tmp_path, trainer=TRAINER[:1], rollout=[]), num_workers=0)
    with pytest.raises(RecipeError, match="there is no 'other'"):
        PreprocessLoad("other")
    with pytest.raises(RecipeError, match="at least 2 steps"):
        PreprocessLoad(steps=1)
