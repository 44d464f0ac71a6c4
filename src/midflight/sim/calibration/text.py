"""What a calibration measured, for people and for plots."""

from __future__ import annotations

from midflight.config import Scenario
from midflight.config.scenario import DelaysConfig, TableDecodeConfig, TrainingConfig
from midflight.sim.costs import RateTable


def rate_tables(scenario: Scenario) -> dict[str, RateTable]:
    """U(h) of a calibrated scenario, by how its engine runs."""
    sections = {"at the same time": scenario.decode, "in turns": scenario.colocated_decode}
    return {
        label: RateTable(decode.sizes, decode.rates)
        for label, decode in sections.items()
        if isinstance(decode, TableDecodeConfig)
    }


def calibration_text(scenario: Scenario) -> str:
    """The table of a calibrated scenario, and its other costs."""
    tables = rate_tables(scenario)
    rates = [dict(zip(table.sizes, table.rates, strict=True)) for table in tables.values()]
    lines = ["sampled tokens a second, by sequences in flight", " " * 8 + "".join(f"{label:>18}" for label in tables)]
    for size in sorted(set().union(*rates)):
        lines.append(
            f"{size:<8}" + "".join(f"{known[size]:>18,.0f}" if size in known else f"{'-':>18}" for known in rates)
        )
    sections = zip(
        tables,
        (scenario.training, scenario.colocated_training or scenario.training),
        (scenario.delays, scenario.colocated_delays or scenario.delays),
        strict=True,
    )
    for label, training, delays in sections:
        lines += [f"training {label}: {_training(training)}", f"delays {label}: {_delays(delays)}"]
    return "\n".join(lines)


def _training(training: TrainingConfig) -> str:
    return (
        f"{1e3 * training.time_per_step:.2f} ms a step, {1e6 * training.time_per_token:.1f} us a token and device,"
        f" {100 * training.without_gradient_fraction:.0f} % of the tokens without a gradient"
    )


def _delays(delays: DelaysConfig) -> str:
    return ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in delays.model_dump().items())
