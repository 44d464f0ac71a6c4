"""Recipe -> the format of prompts. This module does not import torch."""

from __future__ import annotations

from pathlib import Path

from midflight.config import Recipe
from midflight.errors import PromptError, RecipeError
from midflight.models.prompts import PromptFormat
from midflight.models.tokenizer import Tokenizer


def build_prompts(recipe: Recipe, tokenizer: Tokenizer) -> PromptFormat:
    """Return the format of the task's prompts.

    Raises: RecipeError if the template file cannot be read, or a template argument has a reserved name.
    """
    task = recipe.task
    try:
        return PromptFormat(
            tokenizer,
            system_prompt=task.system_prompt,
            template=_text_of(task.chat_template) if task.chat_template else None,
            template_arguments=task.chat_template_arguments,
            max_prompt_tokens=recipe.engine.max_prompt_tokens,
        )
    except PromptError as error:
        raise RecipeError(f"task.chat_template_arguments: {error}; leave it out") from error


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(f"task.chat_template: {path} cannot be read: {reason}") from error
