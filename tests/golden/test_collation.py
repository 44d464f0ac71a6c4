"""Greedy collation against packing in order: exact bins, and the savings on a batch of Magistral's size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from benchmarks.collation import CollationGain, Packing, collation_gain

from golden.numbers import EXPECTED
from midflight.sim.lengths import LengthDistribution, lognormal, uniform

NUM_SEQUENCES = 512
NUM_DRAWS = 12


def lengths_in(packing: Packing, lengths: Sequence[int]) -> list[list[int]]:
    """Sorted lengths of each microbatch, sorted."""
    return sorted(sorted(lengths[index] for index in members) for members in packing.bins)


@pytest.mark.parametrize("example", EXPECTED["T4_collate"], ids=lambda example: f"{len(example['lens'])} sequences")
def test_small_examples(example: dict[str, Any]) -> None:
    lengths = example["lens"]
    gain = collation_gain(lengths, example["C"])
    assert lengths_in(gain.in_order, lengths) == sorted(map(sorted, example["naive"]))
    assert lengths_in(gain.greedy, lengths) == sorted(map(sorted, example["greedy"]))
    assert (gain.in_order.padding, gain.greedy.padding) == (example["naive_padding"], example["greedy_padding"])
    assert gain.greedy.lower_bound == gain.in_order.lower_bound == example["lower_bound"]


def draw_gains(lengths: LengthDistribution, max_tokens: int) -> list[CollationGain]:
    rng = np.random.default_rng(0)
    return [
        collation_gain(lengths.draw(rng, 0, 1, NUM_SEQUENCES)[0].tolist(), max_tokens=max_tokens)
        for _ in range(NUM_DRAWS)
    ]


@pytest.mark.parametrize(
    ("key", "lengths", "max_tokens"),
    [
        ("C1_logn3000_C16384", lognormal(3000, 0.9, 16384), 16384),
        ("C2_logn3000_C65536", lognormal(3000, 0.9, 16384), 65536),
        ("C3_uniform_C8192", uniform(8192), 8192),
    ],
)
def test_batch_of_512(key: str, lengths: LengthDistribution, max_tokens: int) -> None:
    expected = EXPECTED[key]
    gains = draw_gains(lengths, max_tokens)
    for gain in gains:
        assert gain.greedy.lower_bound <= gain.greedy.num_microbatches <= gain.in_order.num_microbatches
    assert np.mean([gain.fewer_microbatches for gain in gains]) == pytest.approx(
        expected["fewer_microbatches"], abs=0.02
    )
    assert np.mean([gain.greedy.padding_fraction for gain in gains]) == pytest.approx(expected["pad_greedy"], abs=0.01)
    assert np.mean([gain.in_order.padding_fraction for gain in gains]) == pytest.approx(expected["pad_naive"], abs=0.02)
