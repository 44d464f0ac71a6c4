"""Table and picture of the SmolLM2 benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from midflight.report.plotting import COLORS, load_pyplot, save_figure, style_axis
from midflight.report.text_table import text_table

_NAMES = {"midflight": "Midflight, in-flight updates", "trl": "TRL, GRPOTrainer"}


def smollm2_table(result: dict[str, Any]) -> str:
    """Return the runs, the variants and the targets as text."""
    runs = [["system", "seed", "before", "after", "seconds", "steps", "samples/s"]]
    for row in result["rows"]:
        accuracies = [f"{row['before']:.3f}", f"{row['after']:.3f}"]
        speed = [f"{row['seconds']:.0f}", str(row["steps"]), f"{row['samples_per_s']:.2f}"]
        runs.append([row["system"], str(row["seed"]), *accuracies, *speed])
    variants = [["recipe", "dtype", "s/step", "trained tok/s", "generated tok/s", "trainer MiB", "rollout MiB"]]
    for row in result["variants"]:
        rates = [f"{row['seconds_per_step']:.2f}", *(f"{row[f'{kind}_tokens_per_s']:.0f}" for kind in _RATES)]
        memory = [f"{row['peak_mib'].get(role, 0):,.0f}" for role in ("trainer", "rollout")]
        variants.append([row["recipe"], row["dtype"], *rates, *memory])
    shares = [
        f"{row['recipe']}, {row['dtype']}, {role}: "
        + ", ".join(f"{name} {share:.0%}" for name, share in row["time_shares"][role].items() if share >= 0.01)
        for row in result["variants"]
        for role in ("rollout", "trainer")
    ]
    targets = [
        f"{'ok' if target['holds'] else 'MISSED'}: {target['name']} {target['value']:.3f} (limit {target['limit']:g})"
        for target in result["targets"]
    ]
    return "\n\n".join([text_table(runs), text_table(variants, left=(0, 1)), "\n".join(shares), "\n".join(targets)])


_RATES = ("trained", "generated")


def write_page(result: dict[str, Any], page: Path, picture: Path) -> None:
    """Replace the figures of the documentation page, between its two marks."""
    before, rest = page.read_text().split(_MARK, 1)
    after = rest.split(_END, 1)[1]
    page.write_text(f"{before}{_MARK}\n\n{_figures(result, picture)}\n\n{_END}{after}")


_MARK, _END = "<!-- figures: written by make smollm2-figures -->", "<!-- end of figures -->"


def _figures(result: dict[str, Any], picture: Path) -> str:
    machine, options = result["machine"], result["options"]
    runs = [["", "seed", "accuracy before", "after", "training, s", "optimizer steps", "responses/s"]]
    for row in result["rows"]:
        accuracies = [f"{row['before']:.3f}", f"{row['after']:.3f}"]
        speed = [f"{row['seconds']:.0f}", str(row["steps"]), f"{row['samples_per_s']:.1f}"]
        runs.append([_NAMES[row["system"]], str(row["seed"]), *accuracies, *speed])
    variants = [["recipe", "dtype", "s per step", "trained", "generated", "trainer, MiB", "rollout, MiB"]]
    shares = [["recipe", "dtype", "rollout process", "trainer process"]]
    for row in result["variants"]:
        name = [f"`{row['recipe']}`", row["dtype"]]
        rates = [f"{row['seconds_per_step']:.2f}", *(f"{row[f'{kind}_tokens_per_s']:.0f}" for kind in _RATES)]
        variants.append([*name, *rates, *(f"{row['peak_mib'].get(role, 0):,.0f}" for role in ("trainer", "rollout"))])
        shares.append([*name, *(_largest(row["time_shares"][role]) for role in ("rollout", "trainer"))])
    return "\n\n".join(
        [
            f"Sampled accuracy on {options['num_problems']} held-out problems before and after {options['steps']}"
            " optimizer steps; TRL trains for as many seconds as the run of the same seed."
            f" {machine['processor']}, {machine['cores']} cores, torch {machine['torch']}"
            " ([smollm2.json](../benchmarks/results/smollm2.json)).",
            _markdown(runs),
            f"![Held-out accuracy over training time, both systems, all seeds](images/{picture.name})",
            f"Tokens per second, peak resident memory and shares of the time, in runs of {options['variant_steps']}"
            " optimizer steps. Trained tokens are response tokens. Both processes count the shared weights.",
            _markdown(variants),
            _markdown(shares),
        ]
    )


def _largest(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.02)


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def plot_smollm2(result: dict[str, Any], out: Path) -> None:
    """Draw held-out accuracy over training time, a line per run. Raises: MissingExtraError without matplotlib."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for row in result["rows"]:
        system = list(_NAMES).index(row["system"])
        seconds = [0.0, *(point["seconds"] for point in row["curve"])]
        accuracies = [row["before"], *(point["accuracy"] for point in row["curve"])]
        is_first = row["seed"] == result["rows"][0]["seed"]
        label = _NAMES[row["system"]] if is_first else "_"  # matplotlib omits "_" from the legend
        axis.plot(seconds, accuracies, "o-", color=COLORS[system], markersize=4, linewidth=1.8, alpha=0.8, label=label)
    axis.set(xlabel="seconds of training on two cores", ylabel="held-out accuracy", xlim=(0, None), ylim=(0, 1))
    style_axis(axis)
    axis.legend(frameon=False, loc="upper left")
    save_figure(figure, out)
