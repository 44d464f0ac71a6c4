"""Shares of a process's time, by the names of its spans."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from midflight.tracing.reading import read_spans


def time_shares(path: Path) -> dict[str, float]:
    """Share of the traced time in each kind of span, the largest first; a span does not count those inside it.

    `other` is the time between the spans. The file holds the spans of one thread.
    Raises: OSError if the file cannot be read.
    """
    spans = sorted(read_spans(path), key=lambda span: (span[1], -span[2]))
    own_ns: defaultdict[str, int] = defaultdict(int)
    around: list[tuple[str, int]] = []  # name and end of the spans that contain the next one
    covered_until = 0
    for name, start, end, _ in spans:
        while around and around[-1][1] <= start:
            around.pop()
        if around:
            own_ns[around[-1][0]] -= end - start
        else:
            own_ns["other"] += max(0, start - covered_until) if covered_until else 0
            covered_until = end
        own_ns[name] += end - start
        around.append((name, end))
    total = sum(own_ns.values())
    return {name: ns / total for name, ns in sorted(own_ns.items(), key=lambda item: -item[1]) if ns > 0}
