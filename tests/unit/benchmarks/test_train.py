"""The load of the training benchmark, its arithmetic, and the check that two steps are the same step."""

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


def test_rollouts_of_a_group_share_their_prompt_and_lengths_are_cut() -> None:
    made = make_trajectories(SHAPE, vocab_size=50, seed=0)
    prompts = [each.token_ids[:4].tolist() for each in made]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3] == prompts[4] == prompts[5]
    lengths = [int(each.loss_mask.sum()) for each in made]
    assert len(set(lengths)) > 1
    assert min(lengths) >= 1
    assert max(lengths) <= 20
    assert all(len(each.token_ids) == 4 + length for each, length in zip(made, lengths, strict=True))
    assert all(each.token_ids.max() < 50 for each in made)
    again = make_trajectories(SHAPE, vocab_size=50, seed=0)
    assert all(np.array_equal(one.token_ids, other.token_ids) for one, other in zip(made, again, strict=True))


def test_the_demos_lengths_have_a_long_tail() -> None:
    made = make_trajectories(DEMO_LOAD, vocab_size=44, seed=0)
    lengths = [int(each.loss_mask.sum()) for each in made]
    assert 12 <= np.median(lengths) <= 48
    assert max(lengths) > 3 * np.median(lengths)


def test_padded_rows_keep_their_order_and_fill_the_room() -> None:
    # 2 * 5 cells fit 12, 3 * 5 do not; then 4 * 3; then 7 alone beside 3 would be 14.
    assert list(natural_batches([5, 2, 3, 3, 1, 2, 3, 7], max_tokens=12)) == [[0, 1], [2, 3, 4, 5], [6], [7]]


def test_padding_is_what_rows_lack_to_the_longest_of_their_batch() -> None:
    # Cells: 2 * 5 and 3 * 4; tokens: 5 + 2 and 4 + 1 + 4.
    assert padding_fraction([5, 2, 4, 1, 4], [[0, 1], [2, 3, 4]]) == pytest.approx(1 - 16 / 22)


def test_useful_flops_by_hand() -> None:
    first, second = make_trajectories(LoadShape(2, 2, 3, 4, 4, sigma=0.0), vocab_size=9, seed=0)
    sizes = ModelSizes(body_parameters=100, head_parameters=10, attention_width=5)
    apart = pack([first], 100) + pack([second], 100)
    # Two sequences of 3 + 4 tokens; each token sees itself and those before it: 1 + ... + 7 pairs.
    assert useful_flops(sizes, apart) == 6 * 100 * 14 + 6 * 10 * 8 + 12 * 5 * 2 * 28
    # Together they have one prompt: 3 tokens and 1 + 2 + 3 pairs less.
    assert useful_flops(sizes, pack([first, second], 100)) == 6 * 100 * 11 + 6 * 10 * 8 + 12 * 5 * 50


def test_sizes_leave_out_embeddings_and_count_a_tied_head_once() -> None:
    model = tiny_model("qwen2")
    sizes, config = ModelSizes.of(model), model.config
    linear = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
    head = config.vocab_size * config.hidden_size
    assert sizes.head_parameters == head
    assert sizes.body_parameters == sum(each.weight.numel() for each in linear) - head
    first_query = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert sizes.attention_width == config.num_hidden_layers * first_query.out_features


def measured(loss: float = 1.0, grad_norm: float = 2.0) -> Measured:
    return Measured(seconds=1.0, loss=loss, grad_norm=grad_norm, others_cores=0.0)


def test_steps_that_agree_but_for_rounding_are_compared() -> None:
    check_agreement(measured(), measured(loss=1.00001, grad_norm=1.99999))


@pytest.mark.parametrize("wrong", [{"loss": 1.001}, {"grad_norm": 2.01}, {"loss": float("nan")}])
def test_steps_that_do_not_agree_are_not(wrong: dict[str, float]) -> None:
    with pytest.raises(BenchmarkError, match=f"{next(iter(wrong))} is"):
        check_agreement(measured(**wrong), measured())


def test_in_bfloat16_more_is_rounding() -> None:
    check_agreement(measured(), measured(grad_norm=2.05), "bfloat16")
    with pytest.raises(BenchmarkError, match="grad_norm is"):
        check_agreement(measured(), measured(grad_norm=2.2), "bfloat16")


def test_a_row_has_the_median_of_the_ratios_and_not_the_ratio_of_the_medians() -> None:
    rounds = [
        {"packed": packed, "padded": padded, "packed_over_padded": packed / padded, "gemm_fraction": 0.5}
        | {"padded_gemm_fraction": 0.25}
        for packed, padded in [(10.0, 1.0), (20.0, 10.0), (30.0, 5.0)]
    ]
    made = row(rounds, padding=0.3)
    assert (made["packed"], made["padded"], made["packed_over_padded"]) == (20.0, 5.0, 6.0)
    assert made["padding_fraction"] == 0.3
    table = train_table([{"model": "demo", "dtype": "float32", **made}])
    assert "6.00" in table
    assert "50.0 %" in table


def test_options_that_cannot_work() -> None:
    with pytest.raises(RecipeError, match=r"6 sequences are not groups of 4"):
        TrainOptions(LoadShape(6, 4, 4, 8, 20))
    with pytest.raises(RecipeError, match=r"23 is less than the longest sequence has, 24"):
        TrainOptions(SHAPE, max_tokens=23)
