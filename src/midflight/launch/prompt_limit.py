"""The limit of `task.drop_long_prompts`, counted with the model's tokenizer.

Imports torch, through the tokenizer, only when prompts are counted: grading processes never count any.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from midflight.config import Recipe
from midflight.errors import PromptError, RecipeError
from midflight.types import Text

if TYPE_CHECKING:
    from midflight.models.prompts import PromptFormat

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class RecipePromptLimit:
    """Implements PromptLimit for the model and the prompt format of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    @property
    def max_tokens(self) -> int:
        return self._recipe.engine.max_prompt_tokens

    @functools.cached_property
    def identity(self) -> str:
        """Hash of the files of the tokenizer and of the keys that change a prompt."""
        task, model = self._recipe.task, self._recipe.model.path
        files = [model / name for name in _TOKENIZER_FILES] + ([task.chat_template] if task.chat_template else [])
        digest = hashlib.blake2b(repr([task.system_prompt, task.chat_template_arguments]).encode(), digest_size=16)
        for path in files:
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()

    def count(self, prompts: Sequence[Text]) -> list[int]:
        """Return the number of tokens of each prompt. Raises: ModelError, RecipeError."""
        try:
            return [len(self._prompt_format.encode_prompt(prompt)) for prompt in prompts]
        except PromptError as error:
            raise RecipeError(
                f"task.drop_long_prompts: {error}; another task.chat_template, or prompts of plain text, would work"
            ) from error

    @functools.cached_property
    def _prompt_format(self) -> PromptFormat:
        from midflight.launch.prompts import build_prompts
        from midflight.models.loading import load_tokenizer

        return build_prompts(self._recipe, load_tokenizer(self._recipe.model.path))
