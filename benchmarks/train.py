"""Trained tokens per second: an optimizer step of midflight's trainer against the same step with padded rows.

Both steps run in this process with every core. Each round runs both; the order changes from round to round. The GEMM
rate is measured between the two steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import BenchModel
from benchmarks.roofline import busy_core_seconds, measure_gemm_rate, synchronize
from benchmarks.train_load import LoadShape, make_trajectories, on_policy, padding_fraction, useful_flops
from benchmarks.train_steps import PackedStep, PaddedStep, TrainStep
from midflight.errors import BenchmarkError, RecipeError
from midflight.preprocess.packing import pack
from midflight.report.machine import describe_machine, num_cores

# Float32 sums in another order differ by about 1e-6, bfloat16 rounding in other places by about 1e-2. One token too
# many or a wrong shift makes a far larger difference.
_AGREEMENT = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of the measurement. `max_tokens`: tokens of a packed microbatch, and cells of a padded one."""

    load: LoadShape
    rounds: int = 3
    max_tokens: int = 4096
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.load.sequences % self.load.group_size:
            raise RecipeError(
                f"--group-size: {self.load.sequences} sequences do not divide into groups of {self.load.group_size}"
            )
        if (longest := self.load.prompt_tokens + self.load.max_response) > self.max_tokens:
            raise RecipeError(f"--max-tokens: {self.max_tokens} is less than the longest sequence, {longest} tokens")


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one optimizer step. Units: seconds; nats."""

    seconds: float
    loss: float
    grad_norm: float
    others_cores: float | None  # mean number of cores that other processes kept busy meanwhile


def bench_train(model: BenchModel, options: TrainOptions, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure both steps; return a row of medians over rounds, every round, and the work behind the fractions.

    Raises: BenchmarkError if loss or gradient norm of the two steps differ.
    """
    machine = describe_machine()
    torch.set_num_threads(num_cores())
    trajectories = on_policy(make_trajectories(options.load, model.vocab_size, seed=0), model.directory, options.device)
    microbatches = pack(trajectories, options.max_tokens)
    dtype: torch.dtype = getattr(torch, options.dtype)
    packed = PackedStep(model.directory, microbatches, len(trajectories), dtype, options.device)
    padded = PaddedStep(model.directory, trajectories, options.max_tokens, dtype, options.device)
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    work = {
        "loss_tokens": sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories),
        "tokens": sum(lengths),
        "packed_tokens": sum(len(microbatch.token_ids) for microbatch in microbatches),
        "padding_fraction": padding_fraction(lengths, padded.batches),
        "useful_flops": useful_flops(packed.sizes, microbatches),
    }
    rounds = [_round(index, packed, padded, work, options, report) for index in range(-1, options.rounds)][1:]
    return {
        "machine": machine,
        "step": "forward, loss, backward, clipping, AdamW",
        "max_tokens": options.max_tokens,
        "load": asdict(options.load),
        "work": work,
        "gemm_rate": statistics.median(result["gemm_rate"] for result in rounds),
        "others_cores": _median_known([result["others_cores"] for result in rounds]),
        "rows": [{"model": model.name, "dtype": options.dtype, **row(rounds, work["padding_fraction"])}],
        "rounds": rounds,
    }


def row(rounds: Sequence[Mapping[str, Any]], padding: float) -> dict[str, float]:
    """Build a row of medians over rounds, also of ratios. Units: `packed`, `padded`: trained tokens per second."""
    keys = ("packed", "padded", "packed_over_padded", "gemm_fraction", "padded_gemm_fraction")
    return {**{key: statistics.median(result[key] for result in rounds) for key in keys}, "padding_fraction": padding}


def measure(step: TrainStep, device: torch.device) -> Measured:
    """Run and measure one step, and the load of other processes meanwhile."""
    busy, cpu, started = busy_core_seconds(), time.process_time(), time.perf_counter()
    loss, grad_norm = step()
    synchronize(device)  # the optimizer's update comes after the norm, on which the step waits
    seconds, own = time.perf_counter() - started, time.process_time() - cpu
    busy_after = busy_core_seconds()
    others = None if busy is None or busy_after is None else round((busy_after - busy - own) / seconds, 2)
    return Measured(seconds, loss, grad_norm, others)


def check_agreement(packed: Measured, padded: Measured, dtype: str = "float32") -> None:
    """Compare two steps. Raises: BenchmarkError unless losses and gradient norms are equal but for rounding."""
    for name in ("loss", "grad_norm"):
        one, other = getattr(packed, name), getattr(padded, name)
        # `not <=` instead of `>`, so that NaN counts as a difference.
        if not abs(one - other) <= _AGREEMENT[dtype] * abs(other):
            raise BenchmarkError(f"the packed step's {name} is {one:.6g}, the padded step's {other:.6g}: not the same")


def _round(
    index: int,
    packed: TrainStep,
    padded: TrainStep,
    work: Mapping[str, float],
    options: TrainOptions,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure both steps and the GEMM rate between them; round -1 is the warm-up."""
    steps = {"packed": packed, "padded": padded}
    order = list(steps) if index % 2 else list(reversed(steps))
    device = torch.device(options.device)
    measured = {order[0]: measure(steps[order[0]], device)}
    gemm_rate = measure_gemm_rate(getattr(torch, options.dtype), options.device)
    measured[order[1]] = measure(steps[order[1]], device)
    check_agreement(measured["packed"], measured["padded"], options.dtype)
    rates = {name: work["loss_tokens"] / step.seconds for name, step in measured.items()}
    fractions = {name: work["useful_flops"] / step.seconds / gemm_rate for name, step in measured.items()}
    result = {
        "round": index,
        "first": order[0],
        **rates,
        "packed_over_padded": rates["packed"] / rates["padded"],
        "gemm_fraction": fractions["packed"],
        "padded_gemm_fraction": fractions["padded"],
        "gemm_rate": gemm_rate,
        "others_cores": max((step.others_cores for step in measured.values() if step.others_cores), default=None),
        "steps": {name: asdict(step) for name, step in measured.items()},
    }
    report(
        f"{'warm-up' if index < 0 else f'round {index}'}: packed {rates['packed']:,.0f} and padded"
        f" {rates['padded']:,.0f} trained tokens/s, {fractions['packed']:.0%} of {gemm_rate / 1e9:.0f} GFLOP/s"
    )
    return result


def _median_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def train_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render trained tokens per second and the fractions, one line per model and dtype."""
    header = ("packed", "padded", "ratio", "of GEMM rate", "padded: of it", "padding")
    lines = [f"{'model':10}{'dtype':10}" + "".join(f"{title:>15}" for title in header)]
    for entry in rows:
        cells = (
            f"{entry['packed']:,.0f}",
            f"{entry['padded']:,.0f}",
            f"{entry['packed_over_padded']:.2f}",
            *(f"{100 * entry[key]:.1f} %" for key in ("gemm_fraction", "padded_gemm_fraction", "padding_fraction")),
        )
        start = f"{Path(entry['model']).name:10}{entry['dtype']:10}"
        lines.append(start + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)
