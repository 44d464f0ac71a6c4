"""Attacks on a server while a run streams: the run goes on with the same tokens, and memory and log stay bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.attacks import NUM_SLOTS, Served, attacking, generate, serving
from midflight.generation.client import HTTPGenerator

NUM = 12 * NUM_SLOTS
ATTACKS = [
    pytest.param("many_200", id="two hundred looping clients"),
    pytest.param("half_requests", id="slowloris"),
    pytest.param("unknown_fields", id="megabytes of unknown fields"),
    pytest.param("wrong_prompts", id="megabytes of wrong prompts"),
    pytest.param("long_prompt", id="prompts of megabytes"),
    pytest.param("never_read", id="readers that never read"),
    pytest.param("foreign_host", id="foreign hosts"),
    pytest.param("foreign_origin", id="foreign origins"),
    pytest.param("wrong_key", id="wrong keys"),
    pytest.param("garbage", id="not HTTP"),
]
pytestmark = [pytest.mark.slow, pytest.mark.faults]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("server")) as served:
        yield served


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> dict[int, list[int]]:
    """Tokens of a run that nobody attacks."""
    with HTTPGenerator(served.url) as client:
        return generate(client, 0, NUM)


@pytest.mark.parametrize("attack", ATTACKS)
def test_run_goes_on_under_attack(served: Served, undisturbed: dict[int, list[int]], attack: str) -> None:
    peak_mib = served.peak_mib()
    with HTTPGenerator(served.url) as client:
        assert len(generate(client, 10_000, NUM_SLOTS)) == NUM_SLOTS
        with attacking(attack, served.url):
            assert generate(client, 0, NUM) == undisturbed
            with HTTPGenerator(served.url, timeout_s=30) as another:  # a run can still connect
                assert generate(another, 0, NUM_SLOTS).items() <= undisturbed.items()
    served.wait_until_idle()
    served.check_bounds(peak_mib)


def test_readers_that_never_read_are_cut(tmp_path: Path) -> None:
    """Without a run as well: their sequences end, and others get the slots."""
    with serving(tmp_path, "serve.client_timeout_s=1") as served:
        with attacking("never_read", served.url):
            answer = served.http.post("/v1/completions", json={"prompt": "a1:", "max_tokens": 2})
            while answer.status_code == 429:
                answer = served.http.post("/v1/completions", json={"prompt": "a1:", "max_tokens": 2})
            assert answer.status_code == 200
        served.wait_until_idle()
