"""Write the dataset of the SmolLM2 recipes, one JSON object per line: sums of numbers up to 20, and of two digits.

python examples/sums_dataset.py src/midflight/recipes/data/sums.jsonl
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

EASY, HARD = range(1, 21), range(10, 100)
NUM_HARD = 800


def rows() -> list[dict[str, str | int]]:
    """Return the rows, always the same: every easy sum, and as many hard ones as `NUM_HARD`."""
    easy = set(itertools.product(EASY, repeat=2))
    hard = random.Random(0).sample(sorted(set(itertools.product(HARD, repeat=2)) - easy), NUM_HARD)
    pairs = [(pair, 1) for pair in sorted(easy)] + [(pair, 2) for pair in hard]
    return [
        {"question": f"What is {a}+{b}?", "answer": str(a + b), "difficulty": difficulty}
        for (a, b), difficulty in pairs
    ]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows()))
