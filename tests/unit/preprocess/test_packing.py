"""Greedy collation packs every sequence once, and as tightly as the published examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.preprocess.packing import assign_to_ranks, collate, pack
from midflight.types import RolloutId, Trajectory


def naive(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack in order of arrival, with a new microbatch for a sequence that does not fit: the baseline."""
    bins: list[list[int]] = []
    for length in lengths:
        if not bins or sum(bins[-1]) + length > max_tokens:
            bins.append([])
        bins[-1].append(length)
    return bins


def greedy(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    return [[lengths[index] for index in members] for members in collate(lengths, max_tokens)]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "in_order", "expected", "padding"),
    [
        (
            [6, 5, 4, 6, 3, 7, 4, 5],
            10,
            [[6], [5, 4], [6, 3], [7], [4, 5]],
            [[7, 3], [6, 4], [6, 4], [5, 5]],
            (10, 0),
        ),
        (
            [5, 9, 2, 8, 3, 7, 6, 4, 1, 10, 2, 3],
            12,
            [[5], [9, 2], [8, 3], [7], [6, 4, 1], [10, 2], [3]],
            [[10, 2], [9, 3], [8, 4], [7, 5], [6, 3, 2, 1]],
            (24, 0),
        ),
        ([10] * 4, 10, [[10]] * 4, [[10]] * 4, (0, 0)),
        ([1] * 25, 10, [[1] * 10, [1] * 10, [1] * 5], [[1] * 10, [1] * 10, [1] * 5], (5, 5)),
        ([], 10, [], [], (0, 0)),
    ],
)
def test_known_packings(
    lengths: list[int],
    max_tokens: int,
    in_order: list[list[int]],
    expected: list[list[int]],
    padding: tuple[int, int],
) -> None:
    assert naive(lengths, max_tokens) == in_order
    bins = greedy(lengths, max_tokens)
    assert [sorted(members, reverse=True) for members in bins] == expected
    assert tuple(len(packing) * max_tokens - sum(lengths) for packing in (in_order, bins)) == padding


@pytest.mark.parametrize(
    ("draw", "max_tokens", "fewer_microbatches", "greedy_padding"),
    [
        (lambda rng: rng.lognormal(np.log(3000), 0.9, 512), 16384, 0.190, 0.006),
        (lambda rng: rng.lognormal(np.log(3000), 0.9, 512), 65536, 0.054, 0.016),
        (lambda rng: rng.integers(1, 8193, 512), 8192, 0.230, 0.027),
    ],
    ids=["lognormal", "lognormal, large microbatches", "uniform"],
)
def test_padding_is_as_small_as_in_the_paper(
    draw: Callable[[np.random.Generator], np.ndarray],
    max_tokens: int,
    fewer_microbatches: float,
    greedy_padding: float,
) -> None:
    """The expected values are means over 40 draws of 512 lengths; no draw is packed worse than in order of arrival."""
    fewer, padding = [], []
    for seed in range(40):
        lengths = draw(np.random.default_rng(seed)).round().astype(int).clip(1, min(max_tokens, 16384)).tolist()
        in_order, packed = len(naive(lengths, max_tokens)), len(greedy(lengths, max_tokens))
        assert packed <= in_order
        fewer.append(1 - packed / in_order)
        padding.append(1 - sum(lengths) / (packed * max_tokens))
    assert np.mean(fewer) == pytest.approx(fewer_microbatches, abs=0.02)
    assert np.mean(padding) == pytest.approx(greedy_padding, abs=0.01)


def test_sequence_longer_than_a_microbatch_is_an_error() -> None:
    with pytest.raises(ValueError, match="11 tokens does not fit into a microbatch of 10 tokens"):
        collate([3, 11], 10)


@given(st.lists(st.integers(1, 64), max_size=60), st.integers(64, 200))
def test_every_sequence_is_in_exactly_one_microbatch(lengths: list[int], max_tokens: int) -> None:
    bins = collate(lengths, max_tokens)
    assert Counter(index for members in bins for index in members) == Counter(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in members) <= max_tokens for members in bins)
    # First fit leaves at most one bin half empty.
    assert sum(2 * sum(lengths[index] for index in members) <= max_tokens for members in bins) <= 1


def trajectory(kind: int, number: int, length: int) -> Trajectory:
    token_ids = np.arange(length, dtype=np.int32) + 1000 * number
    mask = np.arange(length) >= 2
    values = np.where(mask, token_ids, 0).astype(np.float32)
    token_ids[:2] = [kind, kind + 50]
    return Trajectory(
        RolloutId(number), token_ids, mask, -values, values.astype(np.int32), values, float(number), number
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(3, 40)), min_size=1, max_size=20))
def test_packed_tokens_keep_all_their_fields(drawn: list[tuple[int, int]]) -> None:
    """Prompts have two tokens; trajectories of the same kind have the same prompt."""
    trajectories = [trajectory(kind, number, length) for number, (kind, length) in enumerate(drawn)]
    seen = []
    for microbatch in pack(trajectories, max_tokens=64):
        assert microbatch.sequence_lengths.sum() == len(microbatch.token_ids)
        ends = np.cumsum(microbatch.sequence_lengths)
        prompts = []
        for end, length, start, shared, first_version in zip(
            ends,
            microbatch.sequence_lengths,
            microbatch.prefix_starts,
            microbatch.prefix_lengths,
            microbatch.first_versions,
            strict=True,
        ):
            where = np.concatenate([np.arange(start, start + shared), np.arange(end - length, end)])
            number = int(microbatch.token_ids[end - 1]) // 1000
            expected = trajectories[number]
            seen.append(number)
            assert first_version == expected.first_version
            np.testing.assert_array_equal(microbatch.token_ids[where], expected.token_ids)
            np.testing.assert_array_equal(microbatch.position_ids[where], np.arange(len(where)))
            np.testing.assert_array_equal(microbatch.loss_mask[where], expected.loss_mask)
            np.testing.assert_array_equal(microbatch.behavior_logprobs[where], expected.behavior_logprobs)
            np.testing.assert_array_equal(microbatch.weight_versions[where], expected.weight_versions)
            np.testing.assert_array_equal(microbatch.advantages[where], expected.advantages)
            prompts.append((bytes(expected.token_ids[:2]), int(shared)))
        # Each prompt is stored once, with the first trajectory that has it.
        for prompt, shared in prompts:
            first = next(index for index, (other, _) in enumerate(prompts) if other == prompt)
            assert prompts[first][1] == 0
            assert shared == 2 or prompts.index((prompt, 0)) == first
        assert sum(shared == 0 for _, shared in prompts) == len({prompt for prompt, _ in prompts})
    assert sorted(seen) == list(range(len(trajectories)))


@given(st.integers(1, 8), st.integers(0, 12), st.integers(0, 10**6))
def test_ranks_get_equally_many_trajectories(num_ranks: int, size: int, index: int) -> None:
    ranks = assign_to_ranks(num_ranks * size, num_ranks, index)
    assert [len(members) for members in ranks] == [size] * num_ranks
    assert sorted(member for members in ranks for member in members) == list(range(num_ranks * size))
    assert all(members == sorted(members) for members in ranks)
    assert assign_to_ranks(num_ranks * size, num_ranks, index) == ranks


def test_each_batch_is_assigned_differently() -> None:
    """A fixed assignment would always give a rank the same members of each group."""
    assert len({str(assign_to_ranks(16, 2, index)) for index in range(20)}) == 20


def test_unequal_division_among_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="10 rollouts cannot be divided equally among 4 ranks"):
        assign_to_ranks(10, 4, 0)
