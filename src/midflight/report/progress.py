"""Terminal output of a run: a live view during training, and the summary. Presentation only."""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from midflight.config.evaluations import HELD_OUT
from midflight.metrics.averages import mean_over
from midflight.metrics.jsonl import MetricsLine

_PLAIN_LINE_EVERY_S = 5.0
_MANY_FAILED = 0.1  # share of the groups that ended
_NUM_AVERAGED = 20  # steps to average over; single batches are too noisy to read
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_AVERAGE = re.compile(r"eval/.+/avg@\d+")


class LiveView:
    """The state of a run, redrawn on a terminal. Without a terminal, one line every few seconds."""

    def __init__(self, max_steps: int, console: Console) -> None:
        self._max_steps = max_steps
        self._console = console
        self._recent: deque[MetricsLine] = deque(maxlen=_NUM_AVERAGED)
        self._rewards: list[tuple[int, float]] = []  # (version, reward) of the whole run
        self._evaluated: list[str] = []  # figures of the newest evaluation during the run
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next_plain_line = 0.0

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
            self._live.update(Text("starting the processes of the run"), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        if self._recent:
            self._print_plain_line()

    def update(self, lines: Sequence[MetricsLine]) -> None:
        """Add new metrics lines, if any. A version seen before replaces the lines from that version on."""
        for line in lines:
            self._forget_from(line["version"])
            self._recent.append(line)
            if line["reward/mean"] is not None:
                self._rewards.append((line["version"], line["reward/mean"]))
            if "eval/version" in line:
                self._evaluated = _evaluated(line)
        if not lines:
            return
        if self._live:
            self._live.update(self.render(), refresh=True)
        elif time.monotonic() >= self._next_plain_line:
            self._next_plain_line = time.monotonic() + _PLAIN_LINE_EVERY_S
            self._print_plain_line()

    def render(self) -> RenderableType:
        """Return the panel for a terminal."""
        newest = self._recent[-1]
        rewards = [reward for _, reward in self._rewards]
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {newest['version']} of {self._max_steps}"),
            ProgressBar(total=self._max_steps, completed=newest["version"], width=_SPARK_WIDTH),
            Text(f"{_clock(newest['wall_s'])} so far, {_clock(self._eta_s())} left"),
        )
        head.add_row(Text("reward"), Text(_sparkline(rewards), style="green"), Text(f"{self._mean('reward/mean'):.3f}"))
        table = Table.grid(padding=(0, 3))
        for title, *cells in self._rows():
            table.add_row(Text(title, style="bold"), *cells)
        return Panel(Group(head, Text(), table), title="midflight", title_align="left", expand=False)

    def _rows(self) -> list[list[str]]:
        newest = self._recent[-1]
        return [
            [
                "generation",
                f"{self._rate('throughput/generated_tokens_per_s'):,.0f} tokens/s",
                f"{newest.get('in_flight', 0):.0f} in flight",
                f"idle {self._percent('idle/generation_fraction')}",
                f"weight update {1e3 * self._mean('update/pause_s'):.1f} ms",
                *self._failed(),
            ],
            [
                "training",
                f"{self._rate('throughput/trained_tokens_per_s'):,.0f} tokens/s",
                f"{newest['samples']:,} samples",
                f"idle {self._percent('idle/trainer_fraction')}",
                f"step {1e3 * self._mean('time/step_s'):.0f} ms",
            ],
            [
                "policy",
                f"lag {self._mean('lag/mean'):.1f} mean, {self._max('lag/max'):.0f} max",
                f"ESS {self._mean('ess'):.4f}",
                f"entropy {self._mean('entropy'):.3f}",
                f"length {self._mean('length/mean'):.1f}",
            ],
            ["graded", *(f"{name} {self._mean(f'reward/{name}'):.3f}" for name in self._components())],
            *([["evaluated", *self._evaluated]] if self._evaluated else []),
        ]

    def _failed(self) -> list[str]:
        """Text about failed groups in the averaged steps; empty if there are none."""
        num_failed = sum(line.get("dropped/failed_groups", 0) for line in self._recent)
        return [f"{num_failed:.0f} groups failed in {len(self._recent)} steps"] if num_failed else []

    def _components(self) -> list[str]:
        """Names of the reward components that the environment reports."""
        names = {key.removeprefix("reward/") for line in self._recent for key in line if key.startswith("reward/")}
        return sorted(names - {"mean"})

    def _forget_from(self, version: int) -> None:
        """Drop the lines from `version` on: a resumed run repeats the steps after its checkpoint."""
        while self._recent and self._recent[-1]["version"] >= version:
            self._recent.pop()
        while self._rewards and self._rewards[-1][0] >= version:
            self._rewards.pop()

    def _print_plain_line(self) -> None:
        newest = self._recent[-1]
        line = (
            f"step {newest['version']}/{self._max_steps}  {_clock(newest['wall_s'])}"
            f"  reward {self._mean('reward/mean'):.3f}  samples {newest['samples']:,}"
            f"  generated {self._rate('throughput/generated_tokens_per_s'):,.0f} tok/s"
            f"  trained {self._rate('throughput/trained_tokens_per_s'):,.0f} tok/s"
            f"  lag {self._mean('lag/mean'):.1f} (max {self._max('lag/max'):.0f})  ESS {self._mean('ess'):.4f}"
            f"  eta {_clock(self._eta_s())}{''.join('  ' + text for text in (*self._failed(), *self._evaluated))}"
        )
        self._console.print(line, highlight=False, soft_wrap=True)

    def _eta_s(self) -> float:
        first, newest = self._recent[0], self._recent[-1]
        steps = newest["version"] - first["version"]
        per_step = (newest["wall_s"] - first["wall_s"]) / steps if steps else newest["wall_s"]
        return float(per_step * (self._max_steps - newest["version"]))

    def _mean(self, key: str) -> float:
        return mean_over(self._recent, key, weights=None) or 0.0

    def _rate(self, key: str) -> float:
        """Mean over time, not over steps: a step without a gradient takes a millisecond, at a meaningless rate."""
        return mean_over(self._recent, key, weights="time/step_s") or 0.0

    def _max(self, key: str) -> float:
        return max((line[key] for line in self._recent if line.get(key) is not None), default=0.0)

    def _percent(self, key: str) -> str:
        return f"{100 * self._rate(key):.0f} %"


def _evaluated(line: MetricsLine) -> list[str]:
    """Version of the evaluation in a metrics line, and avg@k of each set."""
    averages = {key.removeprefix("eval/"): value for key, value in line.items() if _AVERAGE.fullmatch(key)}
    return [f"version {line['eval/version']:.0f}", *(f"{name} {value:.3f}" for name, value in averages.items())]


def print_summary(summary: dict[str, Any], console: Console | None = None) -> None:
    """Print the summary of a run as a table, on stdout by default."""
    console = console or Console()
    table = Table.grid(padding=(0, 3))
    for title, value in _summary_rows(summary):
        table.add_row(Text(title, style="bold"), Text(value))
    console.print(Panel(table, title="done", title_align="left", expand=False), highlight=False)
    # Outside the panel, so that a long path is never wrapped or cut.
    console.print(summary["run_directory"], soft_wrap=True, highlight=False, markup=False)


def _summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    groups, idle, wall_s = summary["groups"], summary["idle"], summary["train_wall_s"]
    old, carried, dropped = summary["old_token_fraction"], summary["carried_token_fraction"], summary["dropped"]
    tokens = {kind: summary[f"{kind}_tokens"] for kind in ("generated", "trained")}
    rows = [
        *_accuracy_rows(summary["eval_before"] or {}, summary["eval_after"] or {}),
        *_evaluation_rows(summary["evaluations"]),
        ("training", f"{wall_s:.1f} s, {summary['steps']} steps, {summary['samples']:,} samples"),
        *((kind, f"{num:,} tokens, {num / max(wall_s, 1e-9):,.0f} a second") for kind, num in tokens.items()),
        ("weight updates", f"{summary['updates']}, {_ms(summary['update_pause_s'])} each, {summary['aborted']} aborts"),
        ("versions in one rollout", f"up to {summary['versions_per_rollout_max']}"),
        ("lag", f"{summary['mean_lag']:.2f} mean, {summary['max_lag']} max (optimizer steps)"),
        ("effective sample size", _number(summary["mean_ess"])),
        ("idle", f"generation {_number(idle['generation'])}, trainer {_number(idle['trainer'])}"),
        ("tokens of older weights", f"{100 * old:.1f} %, carried over {100 * carried:.1f} %"),
        ("length", _lengths(summary["length_bias"])),
        ("cut off at max_tokens", _percent(summary["clipped_fraction"])),
        ("groups", ", ".join(f"{count} {name}" for name, count in groups.items())),
    ]
    if groups["failed"]:
        rows.append(("failed groups", _failures(summary)))
    if any(dropped.values()):
        causes = f"{dropped['filtered']} without signal, {dropped['queue_full']} because of a full queue"
        rows.append(("dropped", causes))
    if summary["restarts"]:
        rows.append(("process restarts", ", ".join(f"{n} {role}" for role, n in summary["restarts"].items())))
    if summary["skipped_steps"]:
        rows.append(("skipped steps", f"{summary['skipped_steps']} (loss not finite)"))
    return rows


def failure_warning(summary: dict[str, Any]) -> str | None:
    """Return a warning if more than a tenth of the ended groups failed, else None."""
    groups = summary["groups"]
    num_ended = groups["trained"] + groups["dropped"] + groups["failed"]
    if groups["failed"] <= _MANY_FAILED * num_ended:
        return None
    return (
        f"warning: {groups['failed']} of {num_ended} groups failed and were not trained on, {_failures(summary)};"
        f" tracebacks are in {summary['run_directory']}/logs/rollout.log"
    )


def _failures(summary: dict[str, Any]) -> str:
    """Text with the most frequent reason of failures; a run started with an older midflight may have no reasons."""
    reason, count = next(iter(summary["failures"].items()), ("an unknown reason", summary["groups"]["failed"]))
    return f"most often ({count} of {summary['groups']['failed']}) by {reason}"


def _accuracy_rows(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of accuracy before and after training. Either may be empty, or of other problems if [eval] changed."""
    newest = after or before
    if not newest:
        return []
    sets = [
        (f"{name}, avg@{result['samples']}", f"{_avg(before, name)} -> {_avg(after, name)}")
        for name, result in newest["sets"].items()
        if name != HELD_OUT
    ]
    if not newest["num_problems"]:
        return sets
    held_out = f"on {newest['num_problems']} held-out problems"
    rows = [
        (f"accuracy, sampled, {held_out}", _change(before, after, "sampled_accuracy")),
        ("accuracy, greedy", _change(before, after, "greedy_accuracy")),
    ]
    if newest["sampled_accuracy_hard"] is not None:
        title = f"accuracy, sampled, difficulty {newest['hard_from']} and more"
        rows.append((title, _change(before, after, "sampled_accuracy_hard")))
    buckets = "sampled_accuracy_by_difficulty"
    for bucket in newest[buckets]:
        rows.append((f"  difficulty {bucket}", _change(before.get(buckets, {}), after.get(buckets, {}), bucket)))
    return rows + sets


def _avg(evaluation: dict[str, Any], name: str) -> str:
    """Text with avg@k of a set and its standard error; "-" if the evaluation has no such set."""
    estimate = evaluation.get("sets", {}).get(name, {}).get("avg")
    if estimate is None:
        return "-"
    error = estimate["standard_error"]
    return f"{estimate['value']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _evaluation_rows(evaluations: dict[str, Any]) -> list[tuple[str, str]]:
    """Row about evaluations during the run, if there were any: the best version and the tokens."""
    if not evaluations["generated_tokens"]:
        return []
    best, scores = evaluations["best_version"], evaluations["scores"]
    text = f"{len(scores)} versions, {evaluations['generated_tokens']:,} tokens"
    if best is not None:
        text += f", best is version {best} with {scores[str(best)]:.3f}"
    return [("evaluations", text)]


def _change(before: dict[str, Any], after: dict[str, Any], key: str) -> str:
    was, now = ("-" if values.get(key) is None else f"{values[key]:.3f}" for values in (before, after))
    return f"{was} -> {now}"


def _lengths(bias: dict[str, Any]) -> str:
    """Text with mean lengths of generated, trained and dropped responses, and the length bias (KS distance)."""
    means = {kind: bias[f"mean_{kind}"] for kind in ("generated", "trained", "dropped")}
    known = [f"{mean:.1f} {kind}" for kind, mean in means.items() if mean is not None]
    return f"{', '.join(known) or '-'} (mean tokens), bias {_number(bias['ks'])} (KS)"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} % of the responses"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def _sparkline(values: Sequence[float]) -> str:
    """Draw the whole history in a fixed width, on a scale from 0 to the largest value (at least 1)."""
    if not values:
        return ""
    width = min(_SPARK_WIDTH, len(values))
    edges = [len(values) * index // width for index in range(width + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    top = max(1.0, *means)
    return "".join(_SPARKS[min(len(_SPARKS) - 1, max(0, int(mean / top * len(_SPARKS))))] for mean in means)
