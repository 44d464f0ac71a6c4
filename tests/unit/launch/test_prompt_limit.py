"""Tokens of prompts, counted with a recipe's tokenizer and prompt format."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import RecipeError
from midflight.launch.prompt_limit import RecipePromptLimit

RECIPE = SHIPPED_RECIPES["cpu_demo"]


def test_tokens_are_those_of_the_rendered_prompt(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}:{% endfor %}")
    limit = RecipePromptLimit(load_recipe(RECIPE, [f"task.chat_template={template}", "engine.max_prompt_tokens=9"]))
    assert limit.max_tokens == 9
    plain, rendered = limit.count(["a3b9:", [{"role": "user", "content": "a3b9"}]])
    assert plain == rendered > 1


def test_identity_changes_with_template_and_system_prompt(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    identities = []
    for text, prompt in (("a", "x"), ("b", "x"), ("b", "y"), ("b", "y")):
        template.write_text(text)
        recipe = load_recipe(RECIPE, [f"task.chat_template={template}", f"task.system_prompt={prompt}"])
        identities.append(RecipePromptLimit(recipe).identity)
    assert len(set(identities)) == 3
    assert identities[2] == identities[3]


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"^task\.drop_long_prompts: .* no chat template; another task\.chat_template"
    ):
        RecipePromptLimit(load_recipe(RECIPE)).count([[{"role": "user", "content": "a"}]])
