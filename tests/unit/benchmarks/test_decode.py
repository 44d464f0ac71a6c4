"""Decode benchmark: roofline, windows, ratios and the printed table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.decode import DecodeOptions, decode_table, median_ratio, parse_skip, row, vllm_preload
from benchmarks.decode_engines import window
from benchmarks.roofline import Ceilings, measure_ceilings, roofline

from midflight.errors import RecipeError


def entry(engine: str, index: int, rate: float) -> dict[str, Any]:
    return {"engine": engine, "round": index, "tokens_per_s": rate, "compute_dtype": "float32"}


def test_roofline_is_read_bound_then_compute_bound() -> None:
    ceilings = {"float32": Ceilings(gemm_rate=200e9, read_rate=40e9, weight_bytes=400_000_000)}
    assert roofline(1, 100_000_000, ceilings) == pytest.approx(100)
    assert roofline(8, 100_000_000, ceilings) == pytest.approx(800)
    assert roofline(512, 100_000_000, ceilings) == pytest.approx(1000)


def test_roofline_uses_the_best_compute_dtype() -> None:
    """Without bfloat16 instructions, bfloat16 wins for few sequences (half the bytes), float32 for many."""
    slow = Ceilings(gemm_rate=60e9, read_rate=40e9, weight_bytes=200_000_000)
    fast = Ceilings(gemm_rate=240e9, read_rate=40e9, weight_bytes=400_000_000)
    both = {"bfloat16": slow, "float32": fast}
    assert roofline(1, 100_000_000, both) == pytest.approx(200)
    assert roofline(64, 100_000_000, both) == pytest.approx(1200)


@pytest.mark.slow
def test_ceilings_cover_every_compute_dtype() -> None:
    ceilings = measure_ceilings("bfloat16", parameters=1_000_000, num_threads=1)
    assert {name: ceiling.weight_bytes for name, ceiling in ceilings.items()} == {
        "bfloat16": 2_000_000,
        "float32": 4_000_000,
    }
    assert all(ceiling.gemm_rate > 1e8 and ceiling.read_rate > 1e8 for ceiling in ceilings.values())


def test_ratios_are_paired_by_round() -> None:
    assert median_ratio({0: 10.0, 1: 30.0, 2: 8.0}, {0: 5.0, 1: 10.0, 2: 1.0}) == pytest.approx(3.0)
    assert median_ratio({0: 10.0, 1: 30.0}, {1: 10.0}) == pytest.approx(3.0)
    assert median_ratio({0: 10.0}, {}) is None


def test_row_has_null_for_engines_that_did_not_run() -> None:
    rounds = [entry("midflight", index, rate) for index, rate in enumerate((100.0, 300.0, 200.0))]
    rounds += [entry("vllm", index, rate) for index, rate in enumerate((100.0, 100.0, 400.0))]
    assert row(rounds, 1000.0) == {
        "midflight": 200.0,
        "transformers": None,
        "transformers_cb": None,
        "vllm": 100.0,
        "roofline": 1000.0,
        "midflight_compute_dtype": "float32",
        "midflight_over": {"transformers": None, "transformers_cb": None, "vllm": 1.0},
    }


def test_table_marks_missing_engines() -> None:
    rounds = [entry("midflight", 0, 1234.4)]
    table = decode_table([{"model": "demo", "dtype": "float32", "sequences": 8, **row(rounds, 9999.0)}])
    header, line = table.splitlines()
    assert header.split() == [
        "model",
        "dtype",
        "sequences",
        "midflight",
        "transformers",
        "transformers_cb",
        "vllm",
        "roofline",
    ]
    assert line.split() == ["demo", "float32", "8", "1,234", "-", "-", "-", "9,999"]


def test_window_excludes_prefill_and_drain() -> None:
    early, late = [0.0, 1.0, 2.0, 3.0, 4.0], [1.5, 2.0, 3.0, 4.0, 5.0]
    measured = window([early, late], "float32")
    assert (measured.tokens, measured.seconds) == (6, 2.5)  # three tokens each in (1.5, 4.0]


def test_window_holds_whole_steps() -> None:
    stamps = [[step + 0.01 * place for step in range(4)] for place in (2, 0, 1)]
    measured = window(stamps, "float32")
    assert measured.tokens == 3 * 3
    assert measured.seconds == pytest.approx(3.0)


def test_no_window_without_common_decoding() -> None:
    with pytest.raises(ValueError, match="never all decoded"):
        window([[0.0, 1.0], [1.0, 2.0]], "float32")


def test_skip_of_one_size_or_all() -> None:
    skip = parse_skip("transformers_cb:128,transformers")
    options = DecodeOptions(("float32",), (8, 128), skip=skip)
    assert [options.runs("transformers_cb", size) for size in (8, 128)] == [True, False]
    assert [options.runs("transformers", size) for size in (8, 128)] == [False, False]
    assert options.runs("midflight", 128)
    assert not options.runs("vllm", 8)  # no vLLM environment was given


@pytest.mark.parametrize("text", ["vlm", "vllm:many"])
def test_unknown_engine_to_skip_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="--skip"):
        parse_skip(text)


def test_missing_vllm_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--vllm-python"):
        DecodeOptions(("float32",), (1,), vllm_python=tmp_path / "python")


def test_vllm_preloads_openmp_of_its_environment(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert str(library) in vllm_preload(tmp_path / "bin" / "python").split(":")
