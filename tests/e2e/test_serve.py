"""Command `midflight serve`: a server process, and a client that requests, updates and interrupts."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch

from certificates import make_certificate
from contract.weight_sending import Sender
from midflight.concurrency.background import run_in_background
from midflight.config import SHIPPED_RECIPES, load_recipe
from midflight.errors import GenerationLostError
from midflight.generation.client import HTTPGenerator
from midflight.launch.engines import build_engine
from midflight.models.loading import load_config, load_model, weights_of
from midflight.protocols import Generator
from midflight.types import Completion, GenerationRequest, RolloutId, SamplingParams
from midflight.weights.engine_control import trusted_authorities
from narrowing import present
from refusals import Refused

pytestmark = pytest.mark.slow

RECIPE = SHIPPED_RECIPES["cpu_demo"]
MODEL = RECIPE.parent / "models" / "chain_sums"


def start(*overrides: str, target: Path = RECIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "midflight", "serve", str(target), "engine.threads=1", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline()
    assert line.startswith("serving at http://127.0.0.1:"), line or process.communicate()[1]
    return line.removeprefix("serving at ").strip()


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = start("serve.port=0")
    try:
        yield process, url_of(process)
    finally:
        process.kill()
        process.communicate()


def test_serve_update_and_interrupt(served: tuple[subprocess.Popen[str], str]) -> None:
    process, url = served
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        assert [model.id for model in client.models.list()] == ["chain_sums"]
        answer = client.completions.create(model="chain_sums", prompt="a1:", temperature=0)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].text

    recipe = load_recipe(RECIPE)
    weights = weights_of(load_model(MODEL))
    changed = {name: tensor * 1.01 for name, tensor in weights.items()}
    engine = build_engine(recipe, load_config(MODEL), changed, max_num_seqs=64, version=7)
    request = GenerationRequest(RolloutId(0), np.array([5, 6], np.int32), SamplingParams(40), seed=1)
    engine.add([request])
    with HTTPGenerator(url) as generator, Sender(url) as sender:
        generator.adopt(7)
        sender.send(7, changed)
        while generator.weight_version < 7:
            generator.step()
        generator.add([request])
        completions = [completion for each in (generator, engine) for completion in drain(each)]
    ours, expected = (completion.generated for completion in completions)
    assert ours.token_ids.tolist() == expected.token_ids.tolist()
    # The server uses more threads than the test, which changes the order of summation.
    np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-5)
    assert set(ours.weight_versions.tolist()) == {7}

    # The answer to this request must not delay the end of the server.
    waiting = run_in_background(lambda: httpx.post(f"{url}/adopt", json={"version": 8}, timeout=60))
    httpx.post(f"{url}/pause")
    body = {"prompt": "a1:", "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        process.send_signal(signal.SIGINT)
        text = response.read().decode()
    assert '"finish_reason":"abort"' in text
    assert text.endswith("data: [DONE]\n\n")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == ""
    assert waiting.result().json()["error"]["code"] == "shutting_down"


def drain(generator: Generator) -> Iterator[Completion]:
    while generator.num_in_flight:
        yield from generator.step()


def test_serve_a_model_directory_up_to_its_context() -> None:
    """A directory needs no recipe; prompt and response share the 256 positions of the model."""
    process = start("serve.port=0", target=MODEL)
    try:
        with openai.OpenAI(base_url=f"{url_of(process)}/v1", api_key="any") as client:
            assert client.models.retrieve("chain_sums").max_length == 256  # type: ignore[attr-defined]
            for num_prompt_tokens in (2, 250):
                answer = client.completions.create(
                    model="chain_sums", prompt=[5] * num_prompt_tokens, extra_body={"stop_token_ids": []}
                )
                assert present(answer.usage).total_tokens == 256
            with pytest.raises(openai.BadRequestError, match="max_tokens is 7, not 1 to 6 after a prompt"):
                client.completions.create(model="chain_sums", prompt=[5] * 250, max_tokens=7)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["serve.host=0.0.0.0"], "serve.host = '0.0.0.0' is not loopback, so an admin token is needed"),
        (["serve.port=70000"], "serve.port: should be less than or equal to 65535"),
        (["serve.prot=7"], "unknown key serve.prot; did you mean serve.port?"),
        (["sampling.max_tokens=256"], "sampling.max_tokens = 256 leaves no room for the rest of a sequence"),
        (["serve.admin_token=x"], "serve.admin_token on the command line can be read by every user of this machine"),
        (["serve.api_key=x"], "serve.api_key on the command line can be read by every user of this machine"),
        (["serve.api_key_file=/nowhere"], "serve.api_key_file: cannot read /nowhere: No such file or directory"),
        (["serve.tls_cert_file=/nowhere"], "serve.tls_cert_file: cannot read /nowhere: No such file or directory"),
        (["model.path=/nowhere"], "model.path: there is no directory /nowhere"),
        (["engine.device=cuda"], "engine.device = 'cuda': this machine has no CUDA device"),
    ],
)
def test_invalid_input_is_a_one_line_error(overrides: list[str], message: str, refused: Refused) -> None:
    if "engine.device=cuda" in overrides and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert refused("serve", RECIPE, *overrides).startswith(f"midflight: {message}")


def test_directory_without_a_model_is_a_one_line_error(refused: Refused, tmp_path: Path) -> None:
    line = refused("serve", tmp_path)
    assert line == f"midflight: model.path: {tmp_path} has no config.json, no tokenizer.json, no *.safetensors"


def test_a_port_in_use_is_a_one_line_error(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("serve", RECIPE, f"serve.port={port}")
    assert line == (
        f"midflight: cannot listen on 127.0.0.1:{port}: Address already in use; serve.port = 0 picks a free port"
    )


def test_an_address_that_cannot_be_used_is_a_one_line_error(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFLIGHT_ADMIN_TOKEN", "sesame")
    assert "so an API key is needed: set serve.api_key, " in refused("serve", RECIPE, "serve.host=192.0.2.1")
    monkeypatch.setenv("MIDFLIGHT_API_KEY", "open")
    line = refused("serve", RECIPE, "serve.host=192.0.2.1")
    assert line.startswith("midflight: cannot listen on 192.0.2.1:8000: ")
    monkeypatch.setenv("MIDFLIGHT_API_KEY", "sesame")
    assert "the admin token is also an API key" in refused("serve", RECIPE)


def test_secrets_allow_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFLIGHT_ADMIN_TOKEN", "sesame")
    monkeypatch.setenv("MIDFLIGHT_API_KEY", "open")
    process = start("serve.host=0.0.0.0", "serve.port=0")
    try:
        assert process.stdout
        port = process.stdout.readline().strip().rpartition(":")[2]
        for secret, statuses in ((None, (401, 401)), ("open", (403, 200)), ("sesame", (200, 200))):
            headers = {"Authorization": f"Bearer {secret}"} if secret else {}
            paused = httpx.post(f"http://127.0.0.1:{port}/pause", headers=headers)
            models = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers)
            assert (paused.status_code, models.status_code) == statuses
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    finally:
        process.kill()
        process.communicate()


def test_a_run_reaches_a_server_over_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    process = start("serve.port=0", f"serve.tls_cert_file={certificate}", f"serve.tls_key_file={key}")
    try:
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith("serving at https://127.0.0.1:"), line or process.communicate()[1]
        url = line.removeprefix("serving at ").strip()
        trusted_authorities.cache_clear()
        with pytest.raises(GenerationLostError, match="CERTIFICATE_VERIFY_FAILED"):
            HTTPGenerator(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusted_authorities.cache_clear()
        with HTTPGenerator(url) as generator:
            generator.add([GenerationRequest(RolloutId(0), np.array([5, 6], np.int32), SamplingParams(4), seed=1)])
            assert len(list(drain(generator))) == 1
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url.replace("https", "http"))
    finally:
        trusted_authorities.cache_clear()
        process.kill()
        process.communicate()
