"""Contract of every Reference: log-probabilities of the frozen model for tokens with loss, 0 for all others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from contract.weight_sending import incoming
from midflight.errors import GenerationError, GenerationLostError, RequestError
from midflight.generation.driver import GeneratorDriver
from midflight.generation.reference import HTTPReference
from midflight.generation.request_parsing import ServedModel
from midflight.generation.server import create_app
from midflight.models.loading import weights_of
from midflight.preprocess.packing import pack
from midflight.preprocess.reference import FrozenReference
from midflight.protocols import Reference
from midflight.testing.tiny_models import VOCAB_SIZE, tiny_engine, tiny_model
from midflight.types import Microbatch, RolloutId, Trajectory

if TYPE_CHECKING:
    from contract.conftest import RunApp, Server, StartServer

TEMPERATURE = 0.7


def trajectory(index: int, prompt: np.ndarray, response: np.ndarray, carries_loss: np.ndarray) -> Trajectory:
    token_ids = np.concatenate([prompt, response]).astype(np.int32)
    loss_mask = np.concatenate([np.zeros(len(prompt), np.bool_), carries_loss])
    zeros = np.zeros(len(token_ids), np.float32)
    return Trajectory(RolloutId(index), token_ids, loss_mask, zeros, zeros.astype(np.int32), zeros, 0.0, 0)


def shared_prompts() -> Microbatch:
    """Return four groups of rollouts with shared prompts, 2 to 56 tokens each; some response tokens carry no loss."""
    rng = np.random.default_rng(0)
    trajectories = []
    for group, num_prompt in enumerate((1, 9, 17, 32)):
        prompt = rng.integers(0, VOCAB_SIZE, num_prompt)
        for member in range(5):
            length = 24 if member == 0 else int(rng.integers(1, 24))
            carries_loss = rng.random(length) < 0.8
            carries_loss[0] = True
            response = rng.integers(0, VOCAB_SIZE, length)
            trajectories.append(trajectory(5 * group + member, prompt, response, carries_loss))
    (microbatch,) = pack(trajectories, 10_000)
    assert np.count_nonzero(microbatch.prefix_lengths) == 16
    return microbatch


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reference")
    tiny_model().save_pretrained(directory)
    return directory


@pytest.fixture(params=["frozen", "http"])
def reference_at(request: pytest.FixtureRequest, model_directory: Path) -> Iterator[Callable[[float], Reference]]:
    """Return a function from a temperature to a reference."""
    with ExitStack() as stack:

        def make(temperature: float) -> Reference:
            if request.param == "frozen":
                return FrozenReference(model_directory, temperature)
            server = request.getfixturevalue("server")
            return stack.enter_context(HTTPReference(server.url, temperature, num_connections=3))

        yield make


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_logprobs_match_the_frozen_model(
    reference_at: Callable[[float], Reference], model_directory: Path, temperature: float
) -> None:
    microbatch = shared_prompts()
    logprobs = reference_at(temperature).logprobs(microbatch)
    assert logprobs.dtype == np.float32
    assert logprobs.shape == microbatch.token_ids.shape
    assert (logprobs[~microbatch.loss_mask] == 0).all()
    assert (logprobs[microbatch.loss_mask] < 0).all()
    # One trajectory at a time, without shared prompts.
    for prefix, own in microbatch.sequence_positions():
        both = np.concatenate([prefix, own])
        token_ids, carries_loss = microbatch.token_ids[both], microbatch.loss_mask[both]
        carries_loss[: len(prefix)] = False
        first = int(carries_loss.argmax())
        alone = trajectory(0, token_ids[:first], token_ids[first:], carries_loss[first:])
        (expected,) = (FrozenReference(model_directory, temperature).logprobs(each) for each in pack([alone], 100))
        np.testing.assert_allclose(logprobs[own], expected[len(prefix) :], atol=1e-4)


def test_temperature_is_applied(reference_at: Callable[[float], Reference]) -> None:
    microbatch = shared_prompts()
    cold, warm = (reference_at(temperature).logprobs(microbatch) for temperature in (0.5, 1.0))
    assert np.abs(cold - warm)[microbatch.loss_mask].mean() > 0.1


def test_one_sequence_of_two_tokens(reference_at: Callable[[float], Reference], model_directory: Path) -> None:
    (microbatch,) = pack([trajectory(0, np.array([3]), np.array([4]), np.ones(1, np.bool_))], 10)
    expected = FrozenReference(model_directory, TEMPERATURE).logprobs(microbatch)
    np.testing.assert_allclose(reference_at(TEMPERATURE).logprobs(microbatch), expected, atol=1e-4)


class Asked:
    """Result or exception of `logprobs`, called in a thread."""

    def __init__(self, reference: Reference, microbatch: Microbatch) -> None:
        self.answer: object = None
        self._thread = threading.Thread(target=self._ask, args=(reference, microbatch))
        self._thread.start()

    def _ask(self, reference: Reference, microbatch: Microbatch) -> None:
        try:
            self.answer = reference.logprobs(microbatch)
        except Exception as error:
            self.answer = error

    def result(self) -> np.ndarray:
        self._thread.join()
        assert isinstance(self.answer, np.ndarray), self.answer
        return self.answer


def test_requests_respect_the_limits_of_the_server(server: Server) -> None:
    """16 choices at once: 20 sequences over one connection are two requests, each of which can be served."""
    server.http.post("/pause")
    with HTTPReference(server.url, 1.0, num_connections=1) as reference:
        asked = Asked(reference, shared_prompts())
        while not server.driver.num_in_flight:
            pass
        assert server.driver.num_in_flight == 16
        server.http.post("/resume")
        asked.result()


def test_requests_run_concurrently(server: Server) -> None:
    server.http.post("/pause")
    with HTTPReference(server.url, 1.0, num_connections=4) as reference:
        asked = Asked(reference, shared_prompts())
        while server.driver.num_in_flight < 20:
            pass
        server.http.post("/resume")
        asked.result()


def test_an_aborted_request_is_repeated(server: Server, model_directory: Path) -> None:
    microbatch = shared_prompts()
    server.http.post("/pause")
    with HTTPReference(server.url, 1.0, num_connections=1, backoff_s=(0.01,)) as reference:
        asked = Asked(reference, microbatch)
        while not server.driver.num_in_flight:
            pass
        server.driver.abort().result()
        server.http.post("/resume")
        expected = FrozenReference(model_directory, 1.0).logprobs(microbatch)
        np.testing.assert_allclose(asked.result(), expected, atol=1e-4)


@pytest.fixture
def app(tokenizer: PreTrainedTokenizerFast) -> Callable[[], object]:
    """Return a function that makes the application of another server."""

    def make() -> object:
        served = ServedModel("tiny", tokenizer, (), VOCAB_SIZE, 56, 24, 16)
        return create_app(GeneratorDriver(tiny_engine(tiny_model())), served, [])

    return make


def test_a_restarted_server_is_asked_again(running: RunApp, app: Callable[[], object], model_directory: Path) -> None:
    microbatch = shared_prompts()
    with running(app()) as url:
        reference = HTTPReference(url, 1.0, backoff_s=(0.05,) * 100)
    with reference:
        asked = Asked(reference, microbatch)
        with running(app(), port=int(url.rpartition(":")[2])):
            expected = FrozenReference(model_directory, 1.0).logprobs(microbatch)
            np.testing.assert_allclose(asked.result(), expected, atol=1e-4)


def test_an_unreachable_server_is_a_one_line_error(running: RunApp, app: Callable[[], object]) -> None:
    with running(app()) as url:
        reference = HTTPReference(url, 1.0, backoff_s=(0.01, 0.01))
    with reference, pytest.raises(GenerationLostError) as raised:
        reference.logprobs(shared_prompts())
    assert str(raised.value).startswith(f"the reference at {url} was lost: ")
    assert "\n" not in str(raised.value)


def test_a_silent_server_times_out(server: Server) -> None:
    server.http.post("/pause")
    with (
        HTTPReference(server.url, 1.0, timeout_s=0.3) as reference,
        pytest.raises(GenerationLostError, match=r"did not answer within 0\.3 s"),
    ):
        reference.logprobs(shared_prompts())
    server.http.post("/resume")
    while server.driver.num_in_flight:  # requests that the reference abandoned
        server.driver.abort([]).result()


def test_a_weight_update_of_the_reference_is_an_error(start_server: StartServer) -> None:
    server = start_server()
    with HTTPReference(server.url, 1.0) as reference:
        reference.logprobs(shared_prompts())
        server.driver.stage(incoming(5, weights_of(tiny_model(seed=1))))
        server.driver.adopt("", 5).result()
        with pytest.raises(GenerationError, match=r"changed from version 0 to 5"):
            reference.logprobs(shared_prompts())


def test_a_refusal_names_the_url(server: Server) -> None:
    (microbatch,) = pack([trajectory(0, np.arange(30), np.arange(30), np.ones(30, np.bool_))], 100)
    with (
        HTTPReference(server.url, 1.0) as reference,
        pytest.raises(RequestError, match=rf"{server.url}/v1/completions: .*60 tokens, not 1 to 56"),
    ):
        reference.logprobs(microbatch)


def test_a_url_without_server_is_an_error() -> None:
    with pytest.raises(GenerationLostError, match=r"http://127\.0\.0\.1:9 cannot be reached: "):
        HTTPReference("http://127.0.0.1:9", 1.0)
    with pytest.raises(GenerationLostError, match=r"http://127\.0\.0\.1:99x is not a URL: "):
        HTTPReference("http://127.0.0.1:99x", 1.0)


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"object": "list", "data": [{"id": "some", "object": "model"}]}'])
def test_another_kind_of_server_is_an_error(answer: bytes) -> None:
    """Servers of other projects do not report their vocabulary."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(head + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(GenerationLostError, match=f"{url}/v1/models does not answer like a `midflight serve`"):
            HTTPReference(url, 1.0)
        thread.join()


def test_a_url_with_a_route_is_an_error(server: Server) -> None:
    assert httpx.get(f"{server.url}/v1/v1/models").status_code == 404
    with pytest.raises(RequestError, match=f"{server.url}/v1/v1/models: Not Found"):
        HTTPReference(f"{server.url}/v1", 1.0)
