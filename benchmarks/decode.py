"""Decoded tokens per second of several engines: same model, same prompts, same machine, alternating rounds.

Every engine has its own process and uses every core. One process works at a time; the others wait for a line on stdin.
Only the steps in which all sequences decode are counted (decode_engines.py): no prefill, no drain.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import BenchModel
from benchmarks.roofline import busy_core_seconds, measure_ceilings, roofline
from benchmarks.workers import Worker
from midflight.errors import RecipeError, WorkerError
from midflight.report.machine import describe_machine, num_cores

ENGINES = ("midflight", "transformers", "transformers_cb", "vllm")
_VLLM_WORKER = Path(__file__).with_name("vllm_worker.py")
# vLLM's documentation recommends both on CPUs; each is used if it is installed.
_VLLM_PRELOADS = ("/usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4", "{environment}/lib/libiomp5.so")
# The first request also loads the model; vLLM's first request prepares its kernels, too.
_START_SECONDS = 300.0
_WARM_UP_TOKENS = 8
# Windows of small models last tens of milliseconds, so several are added up.
_MIN_SECONDS = 0.5
# Idle OpenMP threads spin for a while (vLLM's for 0.2 s) and would slow down the next engine.
_SETTLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Options of the measurement. `skip` holds (engine, sequences) pairs; sequences None means all sizes."""

    dtypes: tuple[str, ...]
    sequences: tuple[int, ...]
    rounds: int = 3
    prompt_tokens: int = 32
    new_tokens: int = 64
    skip: frozenset[tuple[str, int | None]] = frozenset()
    cap_s: float = 120.0
    vllm_python: Path | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.vllm_python and not self.vllm_python.is_file():
            raise RecipeError(f"--vllm-python: there is no file {self.vllm_python}")
        if self.new_tokens <= _WARM_UP_TOKENS:
            raise RecipeError(f"--new-tokens: {self.new_tokens} should be above the {_WARM_UP_TOKENS} of the warm-up")

    def runs(self, engine: str, sequences: int) -> bool:
        if engine == "vllm" and not self.vllm_python:
            return False
        return (engine, None) not in self.skip and (engine, sequences) not in self.skip


def parse_skip(text: str) -> frozenset[tuple[str, int | None]]:
    """Parse `ENGINE` or `ENGINE:SEQUENCES`, separated by commas.

    Raises: RecipeError if an engine does not exist or a size is not a number.
    """
    pairs = []
    for item in filter(None, text.split(",")):
        engine, _, size = item.partition(":")
        if engine not in ENGINES or (size and not size.isdecimal()):
            raise RecipeError(f"--skip: {item!r} is not ENGINE or ENGINE:SEQUENCES; engines: {', '.join(ENGINES)}")
        pairs.append((engine, int(size) if size else None))
    return frozenset(pairs)


def bench_decode(model: BenchModel, options: DecodeOptions, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure all engines; return rows (medians over rounds, None if an engine did not run), rounds and ceilings."""
    machine = describe_machine()
    rows: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    ceilings = {}
    for dtype in options.dtypes:
        ceilings[dtype] = measure_ceilings(dtype, model.matmul_parameters, num_cores(), options.device)
        with ExitStack() as stack:
            fleet = Fleet(model, dtype, options, stack)
            for sequences in options.sequences:
                own = _measure_size(fleet, sequences, failures, report)
                limit = roofline(sequences, model.matmul_parameters, ceilings[dtype])
                rows.append({"model": model.name, "dtype": dtype, "sequences": sequences, **row(own, limit)})
                rounds += own
    return {
        "machine": machine,
        "window": "from every sequence's first token to the first sequence's last token",
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "rows": rows,
        "rounds": rounds,
        "failures": failures,
        "ceilings": {
            dtype: {name: asdict(ceiling) for name, ceiling in by_compute_dtype.items()}
            for dtype, by_compute_dtype in ceilings.items()
        },
    }


class Fleet:
    """Engine processes for one dtype, started at their first request and killed if they fail."""

    def __init__(self, model: BenchModel, dtype: str, options: DecodeOptions, stack: ExitStack) -> None:
        self.model, self.dtype, self.options = model, dtype, options
        self._stack = stack
        self._workers: dict[str, Worker] = {}

    def measure(self, engine: str, sequences: int, new_tokens: int, seed: int) -> dict[str, Any]:
        """Return tokens and seconds, added up over windows until half a second is full; each window has new prompts.

        `others_cores`: mean number of cores that other processes kept busy meanwhile, about 0 in a fair measurement.

        Raises: TimeoutError after the cap, WorkerError if the engine fails; a later call starts a new process.
        """
        time.sleep(_SETTLE_SECONDS)
        generator = random.Random(seed)
        tokens, seconds, cpu_seconds = 0, 0.0, 0.0
        busy, started = busy_core_seconds(), time.perf_counter()
        while seconds < _MIN_SECONDS:
            prompts = [
                [generator.randrange(self.model.vocab_size) for _ in range(self.options.prompt_tokens)]
                for _ in range(sequences)
            ]
            question = {"prompts": prompts, "new_tokens": new_tokens, "seed": generator.randrange(1 << 31)}
            answer = self._ask(engine, question)
            tokens, seconds = tokens + answer["tokens"], seconds + answer["seconds"]
            cpu_seconds += answer["cpu_seconds"]
        others = None
        if busy is not None and (busy_after := busy_core_seconds()) is not None:
            others = (busy_after - busy - cpu_seconds) / (time.perf_counter() - started)
        return {
            "tokens": tokens,
            "seconds": seconds,
            "compute_dtype": answer["compute_dtype"],
            "others_cores": others and round(others, 2),
        }

    def _ask(self, engine: str, question: Mapping[str, Any]) -> dict[str, Any]:
        timeout_s = self.options.cap_s
        if engine not in self._workers:
            self._workers[engine] = Worker(*self._command(engine))
            self._stack.callback(self._workers[engine].close)
            timeout_s += _START_SECONDS
        try:
            return self._workers[engine].ask(question, timeout_s)
        except (TimeoutError, WorkerError):
            self._workers.pop(engine).kill()
            raise

    def _command(self, engine: str) -> tuple[list[str], dict[str, str]]:
        options = {
            "engine": engine,
            "model": str(self.model.directory),
            "dtype": self.dtype,
            "prompt_tokens": self.options.prompt_tokens,
            "new_tokens": self.options.new_tokens,
            "max_sequences": max(self.options.sequences),
            "num_threads": num_cores(),
            "device": self.options.device,
        }
        if engine == "vllm":
            assert self.options.vllm_python is not None
            python = self.options.vllm_python
            # -P keeps the worker's directory, with modules of these benchmarks, off vLLM's import path.
            return [str(python), "-P", str(_VLLM_WORKER), json.dumps(options)], {"LD_PRELOAD": vllm_preload(python)}
        return [sys.executable, "-m", "benchmarks.decode_worker", json.dumps(options)], {"HF_HUB_OFFLINE": "1"}


def vllm_preload(python: Path) -> str:
    """Value of LD_PRELOAD with the libraries that vLLM should be started with."""
    root = Path("/")
    patterns = [pattern.format(environment=python.absolute().parents[1]) for pattern in _VLLM_PRELOADS]
    return ":".join(str(path) for pattern in patterns for path in sorted(root.glob(pattern.lstrip("/"))))


def _measure_size(
    fleet: Fleet, sequences: int, failures: list[dict[str, Any]], report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure every round at one number of sequences, after a warm-up that is not recorded."""
    engines = [engine for engine in ENGINES if fleet.options.runs(engine, sequences)]
    measured = []
    for index in range(-1, fleet.options.rounds):
        new_tokens = _WARM_UP_TOKENS if index < 0 else fleet.options.new_tokens
        for engine in list(engines):
            where = {"dtype": fleet.dtype, "sequences": sequences, "engine": engine, "round": index}
            try:
                answer = fleet.measure(engine, sequences, new_tokens, seed=1000 * sequences + index + 1)
            except (TimeoutError, WorkerError) as error:
                engines.remove(engine)
                failures.append({**where, "error": str(error)})
                report(f"{engine}, {fleet.dtype}, {sequences} sequences: {error}")
                continue
            if index >= 0:
                rate = answer["tokens"] / answer["seconds"]
                measured.append({**where, **answer, "tokens_per_s": rate})
                report(f"{engine}, {fleet.dtype}, {sequences} sequences, round {index}: {rate:.0f} tokens/s")
    return measured


def row(rounds: Sequence[Mapping[str, Any]], limit: float) -> dict[str, Any]:
    """Build one row: each engine's median, the roofline, and midflight's median per-round ratio to other engines."""
    rates = {
        engine: {entry["round"]: entry["tokens_per_s"] for entry in rounds if entry["engine"] == engine}
        for engine in ENGINES
    }
    compute_dtypes = [entry["compute_dtype"] for entry in rounds if entry["engine"] == "midflight"]
    return {
        **{engine: statistics.median(own.values()) if own else None for engine, own in rates.items()},
        "roofline": limit,
        "midflight_compute_dtype": compute_dtypes[0] if compute_dtypes else None,
        "midflight_over": {
            engine: median_ratio(rates["midflight"], rates[engine]) for engine in ENGINES if engine != "midflight"
        },
    }


def median_ratio(numerators: Mapping[int, float], denominators: Mapping[int, float]) -> float | None:
    """Median ratio over the rounds that both have; None if they share none."""
    shared = numerators.keys() & denominators.keys()
    return statistics.median(numerators[index] / denominators[index] for index in shared) if shared else None


def decode_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render tokens per second, one line per model, dtype and number of sequences."""
    columns = (*ENGINES, "roofline")
    lines = [f"{'model':10}{'dtype':10}{'sequences':>10}" + "".join(f"{column:>17}" for column in columns)]
    for entry in rows:
        rates = ("-" if entry[column] is None else f"{entry[column]:,.0f}" for column in columns)
        start = f"{Path(entry['model']).name:10}{entry['dtype']:10}{entry['sequences']:>10}"
        lines.append(start + "".join(f"{rate:>17}" for rate in rates))
    return "\n".join(lines)
