"""WeightPull: a server takes the version that it is asked for from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.errors import WeightsReplacedError
from midflight.generation.driver import GeneratorDriver
from midflight.generation.weight_pull import WeightPull
from midflight.models.loading import weights_of
from midflight.testing.tiny_models import tiny_engine, tiny_model
from midflight.types import WeightLabel
from midflight.weights.files import FileReceiver, FileSender
from midflight.weights.specs import specs_of


def test_wishes_are_pulled_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version may be asked for before its file is there; weights that were replaced meanwhile are pulled again."""
    weights = weights_of(tiny_model(seed=1))
    sender = FileSender(tmp_path)
    sender.announce(specs_of(weights))
    driver, replaced = GeneratorDriver(tiny_engine(tiny_model())), [WeightsReplacedError("newer weights are there")]
    stage = driver.stage

    def stage_later(incoming: object) -> None:
        if replaced:
            raise replaced.pop()
        stage(incoming)  # type: ignore[arg-type]

    monkeypatch.setattr(driver, "stage", stage_later)
    pull = WeightPull(driver, FileReceiver(tmp_path))
    try:
        for version in (3, 5):
            adopted = driver.adopt("run", version)
            pull.want("run", version)
            sender.send(version, weights.items())
            assert adopted.result(60) == WeightLabel(version, version, "run")
        sender.relabel(6)
        pull.want("run", 6)
        assert driver.adopt("run", 6).result(60) == WeightLabel(6, 5, "run")
    finally:
        pull.close()
        driver.close()
        sender.close()
