"""First sentences of docstrings: no dangling openings, at most thirty words. `make lint` runs this file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A docstring opens with a noun phrase or a verb, never with one of these.
OPENINGS = {"of", "what", "how", "for", "whether", "where", "who", "whose", "which", "that", "those", "when", "if"}
MAX_WORDS = 30


def complaints(source: str) -> Iterator[str]:
    """Yield `line: complaint` for every docstring of a module whose first sentence is a bad one."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        paragraph = " ".join(docstring.split("\n\n")[0].split())
        words = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0].split()
        line = getattr(node, "lineno", 1)
        if re.sub(r"\W", "", words[0]).lower() in OPENINGS:
            yield f"{line}: opens with {words[0]!r}"
        if len(words) > MAX_WORDS:
            yield f"{line}: {len(words)} words in the first sentence, more than {MAX_WORDS}"


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples"])
def test_first_sentences_are_short_and_whole(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{complaint}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for complaint in complaints(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("Of all rollouts, the oldest.", ["1: opens with 'Of'"]),
        ("How many rollouts are in flight.", ["1: opens with 'How'"]),
        ("word " * 30 + "word.", ["1: 31 words in the first sentence, more than 30"]),
        ("word " * 29 + "word. " + "Another sentence. " * 10, []),
        ("Number of rollouts in flight.\n\nWhat follows is free.", []),
    ],
)
def test_bad_first_sentences_are_found(docstring: str, found: list[str]) -> None:
    assert list(complaints(f'"""{docstring}"""')) == found
