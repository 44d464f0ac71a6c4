"""Command line of the benchmarks: results go to stdout, progress to stderr."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.digest import digest
from benchmarks.gpu.command import gpu
from benchmarks.size import size
from benchmarks.tasks.command import tasks
from midflight.errors import RecipeError
from midflight.metrics.jsonl import json_text

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure this machine. Run nothing else on it.")
app.command()(digest)
app.command()(gpu)
app.command()(size)
app.command()(tasks)

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
ModelOption = Annotated[str, typer.Option("--model", help="demo, smollm2, or a model directory")]


@app.command()
def decode(
    model: ModelOption = "demo",
    dtype: Annotated[str, typer.Option(help="float32,bfloat16; default: depends on the model")] = "",
    sequences: Annotated[str, typer.Option(help="numbers of concurrent sequences")] = "1,8,32,128,512",
    rounds: Annotated[int, typer.Option(min=1, help="number of rounds; results are medians")] = 3,
    new_tokens: Annotated[int, typer.Option(help="tokens sampled per sequence")] = 64,
    skip: Annotated[str, typer.Option(help="ENGINE[:SEQUENCES],...: measurements to skip")] = "",
    cap_s: Annotated[float, typer.Option(help="timeout of one measurement (seconds)")] = 120.0,
    vllm_python: Annotated[
        Path | None, typer.Option(envvar="MIDFLIGHT_VLLM_PYTHON", help="Python of an environment with vLLM")
    ] = None,
    as_json: Json = False,
) -> None:
    """Decoded tokens per second: midflight's engine, transformers, vLLM, and the machine's roofline."""
    from benchmarks.decode import DecodeOptions, bench_decode, decode_table, parse_skip
    from benchmarks.models import check_dtype, find_model

    bench_model = find_model(model)
    options = DecodeOptions(
        dtypes=tuple(map(check_dtype, dtype.split(","))) if dtype else bench_model.default_dtypes,
        sequences=tuple(map(_count, sequences.split(","))),
        rounds=rounds,
        new_tokens=new_tokens,
        skip=parse_skip(skip),
        cap_s=cap_s,
        vllm_python=vllm_python,
    )
    result = bench_decode(bench_model, options, Console(stderr=True).print)
    print(json_text(result) if as_json else decode_table(result["rows"]))


@app.command()
def updates(
    models: Annotated[str, typer.Option(help="demo, smollm2 or a directory, separated by commas")] = "demo,smollm2",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    num_updates: Annotated[str, typer.Option("--updates", help="number of weight updates of each model")] = "300,30",
    sequences: Annotated[int, typer.Option(min=1, help="sequences kept in flight")] = 32,
    new_tokens: Annotated[int, typer.Option(min=2, help="tokens sampled per sequence")] = 128,
    as_json: Json = False,
) -> None:
    """Delay of sequences in flight during weight updates: embedded, beside two busy processes, and on a server."""
    from benchmarks.models import check_dtype, find_model
    from benchmarks.updates import NUM_BUSY, bench_updates, targets_of, updates_table
    from benchmarks.updates_remote import bench_remote_updates

    names, counts = models.split(","), list(map(_count, num_updates.split(",")))
    if len(counts) not in (1, len(names)):
        raise RecipeError(f"--updates: {len(counts)} numbers for {len(names)} models; give one number for each")
    rows = []
    for name, count in zip(names, counts * (len(names) // len(counts)), strict=True):
        model, known = find_model(name), check_dtype(dtype)
        for num_busy in (0, NUM_BUSY):
            rows.append(
                bench_updates(
                    model, known, num_updates=count, sequences=sequences, new_tokens=new_tokens, num_busy=num_busy
                )
            )
        rows.append(bench_remote_updates(model, known, num_updates=count, sequences=sequences, new_tokens=new_tokens))
    result = {"rows": rows, "targets": [target for row in rows for target in targets_of(row)]}
    print(json_text(result) if as_json else updates_table(result))


@app.command()
def control(
    servers: Annotated[int, typer.Option(min=1, help="number of servers")] = 64,
    slots: Annotated[int, typer.Option(min=1, help="rollouts in flight per server")] = 64,
    length: Annotated[int, typer.Option(min=1, help="tokens per answer")] = 2000,
    step_ms: Annotated[float, typer.Option(min=1, help="decode step of the scripted engines (ms)")] = 30.0,
    seconds: Annotated[float, typer.Option(min=1, help="duration of the measurement")] = 60.0,
    warm_up: Annotated[float, typer.Option(min=0, help="seconds before it")] = 30.0,
    as_json: Json = False,
) -> None:
    """Idle share of a fleet of scripted engines behind HTTP, and CPU time of the rollout process per token."""
    from benchmarks.control import Fleet, bench_control, control_table

    fleet = Fleet(servers, slots, length, step_ms / 1000)
    result = bench_control(fleet, seconds, warm_up, Console(stderr=True).print)
    print(json_text(result) if as_json else control_table(result["rows"]))


@app.command(name="http")
def http_speed(
    model: ModelOption = "demo",
    sequences: Annotated[int, typer.Option(min=1, help="sequences kept in flight")] = 64,
    lengths: Annotated[str, typer.Option(help="tokens per answer, separated by commas")] = "64,7",
    waiting: Annotated[str, typer.Option(help="numbers of requests that wait, separated by commas")] = "500,2000,8000",
    seconds: Annotated[float, typer.Option(min=0.1, help="duration of each measurement")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1, help="number of rounds; results are medians")] = 3,
    as_json: Json = False,
) -> None:
    """Tokens per second of a server in another process, beside the same engine in this one."""
    from benchmarks.http import HttpLoad, bench_http
    from benchmarks.models import find_model

    load = HttpLoad(
        sequences, tuple(map(_count, lengths.split(","))), tuple(map(_count, waiting.split(","))), seconds, rounds
    )
    report = functools.partial(print, file=sys.stderr, flush=True)
    result = bench_http(find_model(model), load, report)
    if as_json:
        print(json_text(result))


@app.command(name="preprocess")
def preprocess_idle(
    model: Annotated[str, typer.Option(help="smollm2 or demo: policy and reference")] = "smollm2",
    workers: Annotated[str, typer.Option(help="numbers of preprocessing processes, separated by commas")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="optimizer steps of each run")] = 10,
    as_json: Json = False,
) -> None:
    """Idle share of generation beside a reference as large as the policy."""
    from benchmarks.preprocess import PreprocessLoad, bench_preprocess

    load = PreprocessLoad(model, tuple(map(_whole, workers.split(","))), steps)
    result = bench_preprocess(load, functools.partial(print, file=sys.stderr, flush=True))
    if as_json:
        print(json_text(result))


@app.command(name="train")
def train_speed(
    model: ModelOption = "demo",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, over float32 parameters")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="number of rounds; results are medians")] = 3,
    sequences: Annotated[int, typer.Option(min=1, help="rollouts per optimizer step")] = 32,
    group_size: Annotated[
        int, typer.Option(min=0, help="rollouts with the same prompt; 0: 8 for the demo, else 1")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens per microbatch, padding included")] = 4096,
    as_json: Json = False,
) -> None:
    """Trained tokens per second: midflight's packed step, and the same step with padded rows."""
    from benchmarks.models import check_dtype, find_model
    from benchmarks.train import TrainOptions, bench_train, train_table
    from benchmarks.train_load import load_shape

    checked_dtype = check_dtype(dtype)
    bench_model = find_model(model)
    options = TrainOptions(load_shape(bench_model.name, sequences, group_size), rounds, max_tokens, checked_dtype)
    result = bench_train(bench_model, options, Console(stderr=True).print)
    print(json_text(result) if as_json else train_table(result["rows"]))


@app.command()
def ranks(
    num_ranks: Annotated[str, typer.Option("--ranks", help="numbers of ranks of the sharded trainer")] = "2",
    steps: Annotated[int, typer.Option(min=2, help="optimizer steps")] = 10,
    layers: Annotated[int, typer.Option(min=1, help="layers of the random model; 15: 100M parameters")] = 15,
    as_json: Json = False,
) -> None:
    """Peak memory and step time of a single process and of a sharded trainer, and the difference of their weights."""
    from benchmarks.ranks import RanksOptions, bench_ranks, ranks_table

    options = RanksOptions(tuple(map(_count, num_ranks.split(","))), steps, layers)
    result = bench_ranks(options, Console(stderr=True).print)
    print(json_text(result) if as_json else ranks_table(result["rows"]))


@app.command()
def streams(
    kinds: Annotated[str, typer.Option("--streams", help="streams to measure")] = "sqlite,redis",
    records: Annotated[int, typer.Option(min=1, help="number of records")] = 100_000,
    record_bytes: Annotated[int, typer.Option(min=0, help="size of one record (bytes)")] = 2000,
    batch: Annotated[str, typer.Option(help="records appended at once")] = "1,32",
    redis_url: Annotated[str | None, typer.Option(help="default: start a server, if one is installed")] = None,
    as_json: Json = False,
) -> None:
    """Records per second from one process to another, and the growth of memory."""
    from benchmarks.streams import StreamLoad, bench_streams

    load = StreamLoad(records, record_bytes, tuple(map(_count, batch.split(","))), redis_url)
    result = bench_streams(tuple(kinds.split(",")), load, Console(stderr=True).print)
    if as_json:
        print(json_text(result))
        return
    for row in result["rows"]:
        print(
            f"{row['stream']:8}{row['batch']:>4} at once{row['records_per_s']:>10,.0f} records/s; memory grew by"
            f" {row['writer_growth_mib']:.0f} MiB (writer) and {row['reader_growth_mib']:.0f} MiB (reader)"
        )


@app.command()
def weights(
    size: Annotated[str, typer.Option(help="number of parameters: 1M, 135M, 1B")] = "135M",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "bfloat16",
    engines: Annotated[str, typer.Option(help="numbers of engine processes")] = "1,2,4,8",
    rounds: Annotated[int, typer.Option(min=1, help="number of rounds; results are medians")] = 7,
    links: Annotated[str, typer.Option(help="loopback, limited (network namespaces, 1 Gbit/s)")] = "loopback,limited",
    as_json: Json = False,
) -> None:
    """Seconds and bytes of an update of the weights of several engines, compared with a bare broadcast."""
    from benchmarks.models import check_dtype
    from benchmarks.weights import WeightsOptions, bench_weights, weights_table

    counts = tuple(map(_count, engines.split(",")))
    options = WeightsOptions(size, check_dtype(dtype), counts, rounds, tuple(links.split(",")))
    result = bench_weights(options, Console(stderr=True).print)
    print(json_text(result) if as_json else weights_table(result["rows"]))


@app.command()
def memory(
    recipes: Annotated[
        str, typer.Option(help="recipes besides the demo, by name or file; none: an empty text")
    ] = "smollm2_full,smollm2_lora",
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps of each run")] = 8,
    num_problems: Annotated[int, typer.Option(min=1, help="held-out problems of each evaluation")] = 64,
    as_json: Json = False,
) -> None:
    """Memory of every process of a run and of its parts, beside the estimates of a dry run."""
    from benchmarks.memory import MemoryOptions, bench_memory, memory_table

    options = MemoryOptions(tuple(filter(None, recipes.split(","))), steps, num_problems)
    result = bench_memory(options, Console(stderr=True).print)
    print(json_text(result) if as_json else memory_table(result))


@app.command()
def simulator(
    sizes: Annotated[
        str, typer.Option(metavar="GPUS:STEPS,...", help="GPUs and optimizer steps")
    ] = "128:1000,10240:100",
    as_json: Json = False,
) -> None:
    """Duration of simulations of the PipelineRL paper's case study, on one core."""
    from benchmarks.simulator import bench_simulator

    pairs = [size.partition(":") for size in sizes.split(",")]
    result = bench_simulator([(_count(gpus), _count(steps)) for gpus, _, steps in pairs], Console(stderr=True).print)
    if as_json:
        print(json_text(result))
        return
    for row in result["rows"]:
        print(f"{row['gpus']} GPUs, {row['steps']} optimizer steps: {row['seconds']:.1f} s")


@app.command()
def smollm2(
    seeds: Annotated[str, typer.Option(help="seeds of the runs")] = "0,1,2",
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps of one run; TRL has as many seconds")] = 48,
    variant_steps: Annotated[int, typer.Option(min=2, help="optimizer steps of the run of a variant")] = 8,
    num_problems: Annotated[int, typer.Option(min=1, help="held-out problems of one evaluation")] = 200,
    out: Annotated[Path, typer.Option(help="directory of finished runs, which are not repeated")] = Path(
        "runs/smollm2-benchmark"
    ),
    picture: Annotated[Path | None, typer.Option(help="draw accuracy over time to this file")] = None,
    page: Annotated[Path | None, typer.Option(help="write the figures to this page, with the picture")] = None,
    as_json: Json = False,
) -> None:
    """Held-out accuracy of SmolLM2 over training time, beside TRL; speed, memory and time shares of each variant."""
    from benchmarks.smollm2 import SmolOptions, bench_smollm2
    from benchmarks.smollm2_figures import plot_smollm2, smollm2_table, write_page

    options = SmolOptions(out, tuple(map(_whole, seeds.split(","))), steps, variant_steps, num_problems)
    result = bench_smollm2(options, Console(stderr=True).print)
    if picture:
        plot_smollm2(result, picture)
    if picture and page:
        write_page(result, page, picture)
    print(json_text(result) if as_json else smollm2_table(result))


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise typer.BadParameter(f"{text!r} is not a whole number above 0")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is not a whole number from 0")
    return int(text)
