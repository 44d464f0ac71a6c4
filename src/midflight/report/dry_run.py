"""A dry run as text."""

from __future__ import annotations

from typing import Any

from midflight.report.text_table import text_table

_NOT_INCLUDED = (
    "not included: code and libraries, CUDA contexts and graphs, buffers of collectives, fragmentation, evaluation"
)
_FIGURES = {
    "samples": "samples per {unit}",
    "throughput/trained_tokens": "trained tokens per {unit}",
    "lag/mean": "lag, mean (optimizer steps)",
    "lag/p95": "lag, 95 % of tokens",
    "lag/max": "lag, max",
    "idle/trainer_fraction": "trainer idle, share of the time",
}


def dry_run_text(values: dict[str, Any]) -> str:
    """Return the roles, the memory and the expectation of a run as tables; `values` come from `launch.dry_run`."""
    blocks = [f"{values['run']}: a dry run; nothing was started", _roles(values["roles"])]
    if values["memory"] is None:
        blocks.append("memory: unknown without a config.json; set model.path or --model-config FILE")
    else:
        blocks.append(_memory(values["memory"], values["model"]))
    if values["expectation"] is None:
        blocks.append("expected speed and lag: unknown without --scenario FILE; `midflight calibrate` measures one")
    else:
        blocks.append(_expectation(values["expectation"]))
    if values["not_checked"]:
        blocks.append(f"not checked on this machine: {'; '.join(values['not_checked'])}")
    return "\n\n".join(blocks)


def _roles(roles: list[dict[str, Any]]) -> str:
    rows = [["role", "processes", "device", "does"]]
    for role in roles:
        processes = "any number" if role["processes"] is None else role["processes"]
        rows.append([role["role"], processes, role["device"], role["does"]])
    return text_table(rows, left=(0, 2, 3))


def _memory(memory: dict[str, Any], model: dict[str, Any]) -> str:
    """Table with one line per process and one column per part, then the sum of each device."""
    processes = memory["processes"]
    names = list(dict.fromkeys(name for process in processes for name in process["parts"]))
    rows = [["process", "device", *names, "total"]]
    for process in processes:
        cells = [_size(process["parts"][name]) if name in process["parts"] else "" for name in names]
        rows.append([process["process"], process["device"], *cells, _size(process["total"])])
    trained = "" if model["trained"] == model["parameters"] else f", {_count(model['trained'])} of them trained"
    lines = [
        f"memory, estimated from {model['config']}: {_count(model['parameters'])} parameters{trained}; microbatches of"
        f" {memory['max_tokens_per_microbatch']:,} tokens; {memory['sequences_per_engine']:,} sequences of"
        f" {memory['tokens_per_sequence']:,} tokens",
        text_table(rows, left=(0, 1)),
        f"by device: {_devices(memory['devices'])}",
        _NOT_INCLUDED,
    ]
    context = model["max_positions"]
    if context is not None and context < memory["tokens_per_sequence"]:
        lines.append(
            f"too long: the model's context is {context:,} tokens; lower sampling.max_tokens or"
            " engine.max_prompt_tokens"
        )
    return "\n".join(lines)


def _devices(totals: dict[str, int]) -> str:
    """Totals as text; devices with the same total are named together."""
    together: dict[int, list[str]] = {}
    for device, total in totals.items():
        together.setdefault(total, []).append(device)
    return "; ".join(
        f"{devices[0]} {_size(total)}" if len(devices) == 1 else f"{devices[0]} to {devices[-1]} {_size(total)} each"
        for total, devices in together.items()
    )


def _expectation(expectation: dict[str, Any]) -> str:
    formulas = expectation["formulas"] or {}
    rows = [["", "simulated", "formulas"]]
    for name, label in _FIGURES.items():
        cells = [_number(figures.get(name)) for figures in (expectation["simulated"], formulas)]
        rows.append([label.format(unit=expectation["time_unit"]), *cells])
    engines = expectation["num_engines"]
    split = "in turns, or undivided" if engines is None else f"{engines} engines"
    return (
        f"expected by the planner's model, not measured: {expectation['num_gpus']} devices, {split},"
        f" {expectation['steps']} optimizer steps\n{text_table(rows)}"
    )


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.2f} million"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:,.1f} MiB"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
