"""Training benchmark: load, useful FLOPs, and the check that both steps agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.train import Measured, TrainOptions, check_agreement, row, train_table
from benchmarks.train_load import (
    DEMO_LOAD,
    LoadShape,
    ModelSizes,
    make_trajectories,
    natural_batches,
    padding_fraction,
    useful_flops,
)

from midflight.errors import BenchmarkError, RecipeError
from midflight.preprocess.packing import pack
from midflight.testing.tiny_models import tiny_model

SHAPE = LoadShape(sequences=6, group_size=3, prompt_tokens=4, median_response=8, max_response=20)


def test_groups_share_a_prompt_and_lengths_are_clipped() -> None:
    trajectories = make_trajectories(SHAPE, vocab_size=50, seed=0)
    prompts = [trajectory.token_ids[:4].tolist() for trajectory in trajectories]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3] == prompts[4] == prompts[5]
    lengths = [int(trajectory.loss_mask.sum()) for trajectory in trajectories]
    assert len(set(lengths)) > 1
    assert min(lengths) >= 1
    assert max(lengths) <= 20
    assert [len(trajectory.token_ids) for trajectory in trajectories] == [4 + length for length in lengths]
    assert all(trajectory.token_ids.max() < 50 for trajectory in trajectories)
    again = make_trajectories(SHAPE, vocab_size=50, seed=0)
    assert all(np.array_equal(one.token_ids, other.token_ids) for one, other in zip(trajectories, again, strict=True))


def test_demo_lengths_have_a_long_tail() -> None:
    trajectories = make_trajectories(DEMO_LOAD, vocab_size=44, seed=0)
    lengths = [int(trajectory.loss_mask.sum()) for trajectory in trajectories]
    assert 12 <= np.median(lengths) <= 48
    assert max(lengths) > 3 * np.median(lengths)


def test_padded_batches_keep_order_and_fill_the_limit() -> None:
    # 2 * 5 cells fit 12, 3 * 5 do not. Then 4 * 3 fit. 3 and 7 together would be 2 * 7 = 14.
    assert list(natural_batches([5, 2, 3, 3, 1, 2, 3, 7], max_tokens=12)) == [[0, 1], [2, 3, 4, 5], [6], [7]]


def test_padding_fraction_counts_cells_without_a_token() -> None:
    # Cells: 2 * 5 and 3 * 4; tokens: 5 + 2 and 4 + 1 + 4.
    assert padding_fraction([5, 2, 4, 1, 4], [[0, 1], [2, 3, 4]]) == pytest.approx(1 - 16 / 22)


def test_useful_flops_by_hand() -> None:
    first, second = make_trajectories(LoadShape(2, 2, 3, 4, 4, sigma=0.0), vocab_size=9, seed=0)
    sizes = ModelSizes(body_parameters=100, head_parameters=10, attention_width=5)
    separate = pack([first], 100) + pack([second], 100)
    # Two sequences of 3 + 4 tokens. Each token attends to itself and all earlier tokens: 1 + ... + 7 pairs.
    assert useful_flops(sizes, separate) == 6 * 100 * 14 + 6 * 10 * 8 + 12 * 5 * 2 * 28
    # Packed together, they share the prompt: 3 tokens and 1 + 2 + 3 pairs less.
    assert useful_flops(sizes, pack([first, second], 100)) == 6 * 100 * 11 + 6 * 10 * 8 + 12 * 5 * 50


def test_sizes_skip_embeddings_and_count_tied_head_once() -> None:
    model = tiny_model("qwen2")
    sizes, config = ModelSizes.of(model), model.config
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    head = config.vocab_size * config.hidden_size
    assert sizes.head_parameters == head
    assert sizes.body_parameters == sum(module.weight.numel() for module in linear) - head
    first_query = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert sizes.attention_width == config.num_hidden_layers * first_query.out_features


def measured(loss: float = 1.0, grad_norm: float = 2.0) -> Measured:
    return Measured(seconds=1.0, loss=loss, grad_norm=grad_norm, others_cores=0.0)


def test_steps_that_differ_by_rounding_agree() -> None:
    check_agreement(measured(), measured(loss=1.00001, grad_norm=1.99999))


@pytest.mark.parametrize("wrong", [{"loss": 1.001}, {"grad_norm": 2.01}, {"loss": float("nan")}])
def test_steps_that_differ_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BenchmarkError, match=f"{next(iter(wrong))} is"):
        check_agreement(measured(**wrong), measured())


def test_bfloat16_allows_more_rounding() -> None:
    check_agreement(measured(), measured(grad_norm=2.05), "bfloat16")
    with pytest.raises(BenchmarkError, match="grad_norm is"):
        check_agreement(measured(), measured(grad_norm=2.2), "bfloat16")


def test_row_has_the_median_of_the_ratios() -> None:
    rounds = [
        {"packed": packed, "padded": padded, "packed_over_padded": packed / padded, "gemm_fraction": 0.5}
        | {"padded_gemm_fraction": 0.25}
        for packed, padded in [(10.0, 1.0), (20.0, 10.0), (30.0, 5.0)]
    ]
    medians = row(rounds, padding=0.3)
    assert (medians["packed"], medians["padded"], medians["packed_over_padded"]) == (20.0, 5.0, 6.0)
    assert medians["padding_fraction"] == 0.3
    table = train_table([{"model": "demo", "dtype": "float32", **medians}])
    assert "6.00" in table
    assert "50.0 %" in table


def test_impossible_options_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"6 sequences do not divide into groups of 4"):
        TrainOptions(LoadShape(6, 4, 4, 8, 20))
    with pytest.raises(RecipeError, match=r"23 is less than the longest sequence, 24 tokens"):
        TrainOptions(SHAPE, max_tokens=23)
