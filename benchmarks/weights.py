"""Duration of an update of the weights of 1, 2, 4 and 8 engine processes, beside bare broadcasts to the same processes.

An update counts from the call of `send` until the last engine has the weights in its own memory. Loopback: all
processes share the cores of this machine. Limited links: each process has a network namespace, with a link of 1 Gbit/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.limited_links import limited_links, why_impossible
from benchmarks.weight_processes import Load, measure
from midflight.errors import RecipeError
from midflight.report.machine import describe_machine
from midflight.types import TensorSpec
from midflight.weights.specs import num_bytes

_RATE = "1gbit"
_MAX_OVER_BROADCAST = 1.3
_MAX_OVER_ONE_ENGINE = 3.5


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Shapes of a Llama with tied embeddings."""

    hidden: int
    ffn: int
    layers: int
    key_value: int  # columns of the key and value projections
    vocabulary: int

    def specs(self, dtype: str) -> list[TensorSpec]:
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocabulary, self.hidden), "norm": (self.hidden,)}
        for layer in range(self.layers):
            square, wide = (self.hidden, self.hidden), (self.ffn, self.hidden)
            narrow = (self.key_value, self.hidden)
            parts: dict[str, tuple[int, ...]] = {
                "q": square,
                "k": narrow,
                "v": narrow,
                "o": square,
                "gate": wide,
                "up": wide,
                "down": wide[::-1],
            }
            parts |= {"input_norm": (self.hidden,), "post_norm": (self.hidden,)}
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
        return [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]


# A toy model, SmolLM2-135M and Llama-3.2-1B.
SIZES = {
    "1M": ModelSize(hidden=128, ffn=512, layers=4, key_value=64, vocabulary=128),
    "135M": ModelSize(hidden=576, ffn=1536, layers=30, key_value=192, vocabulary=49152),
    "1B": ModelSize(hidden=2048, ffn=8192, layers=16, key_value=512, vocabulary=128256),
}


@dataclass(frozen=True, slots=True)
class WeightsOptions:
    """Load of the benchmark. `links`: `loopback`, `limited` or both."""

    size: str
    dtype: str
    engines: tuple[int, ...]
    rounds: int
    links: tuple[str, ...]


def bench_weights(options: WeightsOptions, report: Callable[[str], None]) -> dict[str, Any]:
    """Return a row per kind of links and number of engines, and the targets.

    `over_broadcast`: time of an update over the time of a bare broadcast in the same round, the better of one flat
    tensor and tensor by tensor; median over rounds. `sent_bytes`: bytes that left the trainer's process over TCP.
    Units: seconds, bytes.
    Raises: RecipeError if the size does not exist; WorkerError if a process fails.
    """
    if options.size not in SIZES:
        raise RecipeError(f"--size: there is no {options.size!r}; known are {', '.join(SIZES)}")
    specs = SIZES[options.size].specs(options.dtype)
    model = {
        "size": options.size,
        "parameters": sum(math.prod(spec.shape) for spec in specs),
        "dtype": options.dtype,
        "model_bytes": sum(map(num_bytes, specs)),
    }
    rows: list[dict[str, Any]] = []
    for links in options.links:
        reason = why_impossible() if links == "limited" else None
        for engines in options.engines:
            row: dict[str, Any] = {"links": links, "engines": engines, **model}
            if reason is not None:
                row["skipped"] = reason
            elif links == "limited":
                with limited_links(engines + 1, _RATE) as names:
                    row |= measure(Load(specs, engines, options.rounds, names))
            else:
                row |= measure(Load(specs, engines, options.rounds))
            rows.append(row)
            report(_line(row))
    return {"machine": describe_machine(), "rounds": options.rounds, "rows": rows, "targets": _targets(rows)}


def _targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = [row for row in rows if "skipped" not in row]
    targets = [
        target
        for row in measured
        if row["links"] == "loopback"
        for target in (
            _target(f"{row['engines']} engines, loopback: update / bare broadcast", row["over_broadcast"]),
            _target(
                f"{row['engines']} engines, loopback: update / bare broadcast, tensor by tensor",
                row["seconds"] / row["per_tensor_s"],
            ),
        )
    ]
    limited = {row["engines"]: row["seconds"] for row in measured if row["links"] == "limited"}
    if {1, 8} <= limited.keys():
        name = f"links of {_RATE}: update of 8 engines / of 1"
        targets.append(_target(name, limited[8] / limited[1], _MAX_OVER_ONE_ENGINE))
    return targets


def _target(name: str, value: float, limit: float = _MAX_OVER_BROADCAST) -> dict[str, Any]:
    return {"name": name, "value": value, "limit": limit, "holds": value <= limit}


def weights_table(rows: list[dict[str, Any]]) -> str:
    """Render one line per row."""
    head = f"{'links':10}{'engines':>8}{'update s':>10}{'send s':>8}{'GB sent':>9}{'broadcast s':>13}{'ratio':>7}"
    return "\n".join([head + f"{'GB sent':>9}{'shared memory s':>17}", *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    head = f"{row['links']:10}{row['engines']:>8}"
    if "skipped" in row:
        return f"{head}  skipped: {row['skipped']}"
    shared = f"{row['shared_memory_s']:.3f}" if "shared_memory_s" in row else "-"
    return (
        f"{head}{row['seconds']:>10.3f}{row['send_s']:>8.3f}{row['sent_bytes'] / 1e9:>9.2f}{row['broadcast_s']:>13.3f}"
        f"{row['over_broadcast']:>7.2f}{row['flat_bytes'] / 1e9:>9.2f}{shared:>17}"
    )
