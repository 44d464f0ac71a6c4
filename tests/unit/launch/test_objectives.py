"""From a recipe's [loss] to the objective: names, options, and the user's own function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from midflight.config import SHIPPED_RECIPES, Recipe, load_recipe
from midflight.errors import RecipeError
from midflight.launch.build import check_recipe
from midflight.launch.objectives import build_loss, build_objective
from midflight.losses.inputs import LossInputs, LossOutput

OWN_LOSS = """
from midflight.losses.inputs import LossOutput

def likelihood(inputs, scale, offset=0.0):
    return LossOutput(offset - scale * (inputs.token_weights * inputs.policy_logprobs).sum())

number = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses_of_mine.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def recipe_of(tmp_path: Path) -> Callable[..., Recipe]:
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\npath = "model"\n[schedule]\ntype = "pipeline"\nnum_in_flight = 48\n')

    def make(*overrides: str) -> Recipe:
        return load_recipe(path, overrides)

    return make


def three_tokens() -> LossInputs:
    """Three sequences of one token: ratios 2, 0.5 and 8, advantages 1, -1 and -1, token weights 1."""
    behavior = torch.tensor([-2.0, -1.0, -3.0], dtype=torch.float64)
    return LossInputs(
        (behavior + torch.tensor([2.0, 0.5, 8.0], dtype=torch.float64).log()).requires_grad_(),
        behavior,
        torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64),
        torch.ones(3, dtype=torch.float64),
        torch.arange(3),
        3,
        proximal_logprobs=behavior,
    )


def gradient_of(recipe: Recipe) -> list[float]:
    inputs = three_tokens()
    (gradient,) = torch.autograd.grad(build_loss(recipe)(inputs).loss, inputs.policy_logprobs)
    return gradient.tolist()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["loss.type=reinforce"], [-2, 0.5, 5]),
        (["loss.type=reinforce", "loss.max_ratio=1.5"], [-1.5, 0.5, 1.5]),
        (["loss.type=cispo"], [-2, 0.5, 5]),
        (["loss.type=cispo", "loss.clip_low=0.25", "loss.clip_high=0.5"], [-1.5, 0.75, 1.5]),
        (["loss.type=grpo"], [0, 0, 0]),
        (["loss.type=grpo", "loss.clip_high=1.5", "loss.max_ratio=9"], [-2, 0, 8]),
        (["loss.type=grpo", "loss.clip_low=0.6"], [0, 0.5, 0]),
        (["loss.type=dapo", "loss.clip_high=1.5"], [-2, 0, 0]),
        (["loss.type=dapo", "loss.max_ratio=9"], [0, 0, 8]),
        (["loss.type=gspo", "loss.clip_low=0.6"], [0, 0.5, 0]),
        (["loss.type=ppo", "advantage.type=value", "loss.clip_high=1.5"], [-2, 0, 0]),
        (["loss.type=decoupled_ppo", "loss.clip_high=1.5", "loss.max_ratio=9"], [-2, 0, 8]),
    ],
)
def test_options_of_the_recipe_reach_the_loss(
    recipe_of: Callable[..., Recipe], overrides: list[str], expected: list[float]
) -> None:
    assert gradient_of(recipe_of(*overrides)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loss_type", "denominator"),
    [
        ("reinforce", "tokens"),
        ("cispo", "tokens"),
        ("grpo", "sequence_mean"),
        ("dapo", "tokens"),
        ("gspo", "sequence_mean"),
        ("decoupled_ppo", "tokens"),
    ],
)
def test_each_loss_has_the_denominator_of_its_paper(
    recipe_of: Callable[..., Recipe], loss_type: str, denominator: str
) -> None:
    assert build_objective(recipe_of(f"loss.type={loss_type}")).denominator == denominator
    chosen = build_objective(recipe_of(f"loss.type={loss_type}", "loss.denominator=constant"))
    assert chosen.denominator == "constant"


def test_options_of_the_added_terms_reach_the_objective(recipe_of: Callable[..., Recipe]) -> None:
    objective = build_objective(
        recipe_of(
            "loss.type=decoupled_ppo", "loss.max_ratio=3", "loss.token_mask=[0.5, 2]", "loss.sequence_mask=[0.9, 1.2]",
            "loss.kl_coefficient=0.1", "loss.kl_estimator=k1", "loss.kl_unbiased=false",
            "loss.entropy_coefficient=0.01", "loss.proximal_every=7", "sampling.max_tokens=50",
            "advantage.type=value", "advantage.gae_lambda=0.9", "advantage.value_coefficient=0.25",
            "advantage.value_clip=0.1",
        )
    )  # fmt: skip
    named = {
        "max_ratio": 3,
        "max_response_tokens": 50,
        "token_mask": (0.5, 2),
        "sequence_mask": (0.9, 1.2),
        "kl_coefficient": 0.1,
        "kl_estimator": "k1",
        "kl_unbiased": False,
        "entropy_coefficient": 0.01,
        "proximal_every": 7,
        "gae_lambda": 0.9,
        "value_coefficient": 0.25,
        "value_clip": 0.1,
    }
    assert {name: getattr(objective, name) for name in named} == named


def custom(function: str, options: str = "{}") -> list[str]:
    return [f"loss.type={function}", f"loss.options={options}"]


def test_own_function_works_as_loss(recipe_of: Callable[..., Recipe]) -> None:
    recipe = recipe_of(*custom("losses_of_mine:likelihood", "{scale = 2.0}"), "loss.kl_coefficient=0")
    assert gradient_of(recipe) == [-2, -2, -2]
    assert recipe.loss.needs_every_token
    inputs = three_tokens()
    output = build_loss(recipe_of(*custom("losses_of_mine:likelihood", "{scale = 0.0, offset = 3.0}")))(inputs)
    assert isinstance(output, LossOutput)
    assert output.loss.item() == 3


def test_terms_are_added_to_an_own_loss_too(recipe_of: Callable[..., Recipe]) -> None:
    recipe = recipe_of(*custom("losses_of_mine:likelihood", "{scale = 0.0}"), "loss.entropy_coefficient=0.5")
    inputs = three_tokens()
    entropy = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    with_entropy = LossInputs(**{name: getattr(inputs, name) for name in inputs.__slots__} | {"entropy": entropy})
    assert build_objective(recipe)(with_entropy).loss.item() == pytest.approx(-3)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("no_such_module:loss", "{}", "loss.type: cannot import 'no_such_module:loss': No module named"),
        ("losses_of_mine:missing", "{}", "loss.type: cannot import 'losses_of_mine:missing': "),
        ("losses_of_mine:likelihood", "{}", "loss.options: losses_of_mine:likelihood: missing"),
        ("losses_of_mine:likelihood", "{scale = 1, twist = 2}", "losses_of_mine:likelihood: got an unexpected keyword"),
        ("losses_of_mine:number", "{}", "loss.type: 'losses_of_mine:number' is of type int, not a class or function"),
    ],
)
def test_wrong_function_is_one_line(
    recipe_of: Callable[..., Recipe], function: str, options: str, message: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        build_objective(recipe_of(*custom(function, options)))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("function", ["losses_of_mine", "losses_of_mine.likelihood", ":likelihood", "a:b:c", "a-b:c"])
def test_wrong_import_path_is_refused_with_the_recipe(recipe_of: Callable[..., Recipe], function: str) -> None:
    with pytest.raises(RecipeError, match=r"^loss\.type: "):
        recipe_of(*custom(function))


def test_missing_loss_is_refused_before_a_process_starts() -> None:
    demo = SHIPPED_RECIPES["cpu_demo"]
    recipe = load_recipe(demo, ["loss.type=losses_of_mine:nothing"])
    with pytest.raises(RecipeError, match=r"loss\.type: cannot import 'losses_of_mine:nothing'"):
        check_recipe(recipe)
