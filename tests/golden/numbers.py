"""Golden numbers that formulas and simulator must reproduce, and their workload.

The case study (A1) is partly circular: the decoding rates U(h) were fitted to figures that the paper prints, A1's among
them. The test of A1 shows that the formulas are applied as in the paper, not that U(h) is true of an H100.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from midflight.sim.costs import PAPER_STEP_COST, PAPER_TRAIN_TIME_PER_TOKEN, StepCost
from midflight.sim.lengths import LengthDistribution, uniform
from midflight.sim.workload import Workload

EXPECTED: dict[str, Any] = json.loads((Path(__file__).parent / "expectations.json").read_text())


def paper_workload(
    num_gpus: int = 128,
    batch_size: int = 128,
    lengths: LengthDistribution | None = None,
    step_cost: StepCost = PAPER_STEP_COST,
    train_time_per_token: float = PAPER_TRAIN_TIME_PER_TOKEN,
) -> Workload:
    """Build the case study: 128 GPUs, batches of 128, lengths uniform up to 8192."""
    return Workload(num_gpus, batch_size, lengths or uniform(8192), step_cost, train_time_per_token)
