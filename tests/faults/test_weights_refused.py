"""Servers that cannot take the weights of a run: one line names the engine and the reason, and the others go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from faults.fleet import Fleet, Server, fleet
from faults.tcp_proxy import Direction
from midflight.config import SHIPPED_RECIPES
from refusals import Refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RECIPE = SHIPPED_RECIPES["cpu_demo"]
MODEL = RECIPE.parent / "models" / "chain_sums"


def changed_model(
    directory: Path, name: str, config: Mapping[str, object], changed: Mapping[str, torch.Tensor]
) -> Path:
    """Write a copy of the demo's model with another configuration, and with other tensors."""
    path = directory / name
    shutil.copytree(MODEL, path)
    settings = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(settings))
    save_file(load_file(path / "model.safetensors") | changed, path / "model.safetensors")
    return path


def deeper(directory: Path) -> Path:
    """Another model: one more layer."""
    weights = load_file(MODEL / "model.safetensors")
    fourth = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in weights.items()
        if ".layers.2." in name
    }
    config = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    return changed_model(directory, "deeper", config, fourth)


def wider(directory: Path) -> Path:
    """The same names with other shapes."""
    weights = load_file(MODEL / "model.safetensors")
    sides = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
    wide = {
        name: torch.cat([tensor, tensor], sides[name.split(".")[-2]])
        for name, tensor in weights.items()
        if ".mlp." in name
    }
    return changed_model(directory, "wider", {"intermediate_size": 768}, wide)


@pytest.mark.faults
def test_servers_that_do_not_fit_are_left_out_by_name(tmp_path: Path) -> None:
    with fleet(tmp_path / "run", names=("one",)) as members:
        run = members.run
        others = [join(members, f"{make.__name__}", f"model.path={make(tmp_path)}") for make in (deeper, wider)]
        older = join(members, "older")
        older.link.rewrite_answers(answer_of_an_older_protocol)
        older.restart()
        entries = {
            "nowhere": '{"url": "http://127.0.0.1:9"}',
            "unroutable": '{"url": "http://192.0.2.1:9"}',
            "nonsense": '{"url": "ftp:/"}',
            "damaged": '{"url": ',
        }
        for name, text in entries.items():
            (run.directory.engines / f"{name}.json").write_text(text)
            members.tell(f"registry entry {text}")
        expected = {
            "deeper": "'model.layers.3.",
            "wider": "'model.layers.0.mlp.",
            "older": "version 1 of the weight routes",
            "nowhere": "127.0.0.1:9",
            "unroutable": "192.0.2.1:9",
            "nonsense": "ftp:/",
            "damaged": "damaged.json",
        }
        for name, reason in expected.items():
            run.wait_until(lambda: line_about(members, name, reason) is not None)  # noqa: B023
        members.wait_for_updates(members.servers)
        members.wait_for_tokens(members.servers)
        for server in (*others, older):
            reading = server.read()
            assert reading is not None
            assert reading.tokens == 0, f"server {server.name} got requests"
            server.close()
        for path in run.directory.engines.glob("*.json"):
            if path.stem != "one":
                path.unlink()


def line_about(members: Fleet, name: str, reason: str) -> str | None:
    return next((line for line in members.run.said if f"engine {name} " in line and reason in line), None)


def join(members: Fleet, name: str, *overrides: str) -> Server:
    server = Server(name, members.run.directory, members.proxies, *overrides)
    members.tell(f"a server that does not fit joins: {name}")
    return server


def answer_of_an_older_protocol(direction: Direction, chunk: bytes) -> bytes:
    return chunk.replace(b'"protocol":2', b'"protocol":1') if direction == "down" else chunk


HTTP = ("engine.type=http", "weights.type=process_group")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((*HTTP, "weights.backend=nccl"), ("weights.backend", "nccl", "CUDA")),
        (("engine.type=http", "weights.type=shared_memory"), ("weights.type", "shared_memory", "engine.type")),
        (("weights.type=process_group",), ("weights.type", "process_group", "engine.type")),
        ((*HTTP, "weights.timeout_s=0"), ("weights.timeout_s", "greater than 0")),
        ((*HTTP, "weights.bucket_mib=0"), ("weights.bucket_mib", "greater than or equal to 1")),
    ],
)
def test_impossible_transports_are_one_line(
    overrides: tuple[str, ...], words: tuple[str, ...], refused: Refused, tmp_path: Path
) -> None:
    if "weights.backend=nccl" in overrides and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    line = refused("train", RECIPE, f"run.directory={tmp_path / 'run'}", *overrides)
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()
