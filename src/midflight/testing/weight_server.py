"""Server with the weight routes only: stands in for a generation server where nothing is generated.

Run as a program: `python -m midflight.testing.weight_server OPTIONS`, with the fields of ServerOptions as JSON. The
program writes its URL to its output, runs until its input ends, and may stop or kill itself at a phase of an update.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from midflight.errors import WeightUpdateError
from midflight.types import TensorSpec
from midflight.weights.engine_control import PROTOCOL
from midflight.weights.group_receiver import ProcessGroupReceiver
from midflight.weights.process_group import Announcement, Invitation
from midflight.weights.progress import Progress
from midflight.weights.specs import torch_dtype

Phase = str  # "invited", "joined", "announced", "received", or the name of a tensor that has arrived


class RefusalError(Exception):
    """An answer with an error code."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


@dataclass(slots=True)
class WeightServer:
    """State of the server. `at` is called at each phase, in the thread that handles the request."""

    specs: Sequence[TensorSpec]
    at: Callable[[Phase], object] = lambda phase: None
    protocol: int = PROTOCOL
    host: str = "127.0.0.1"
    weights: dict[str, Tensor] = field(init=False)
    version: int = -1
    content: int = -1
    lineage: str = ""
    failures: list[str] = field(default_factory=list)  # errors of invitations and updates
    receiver: ProcessGroupReceiver | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    url: str = field(init=False)
    _http: ThreadingHTTPServer = field(init=False)

    def __post_init__(self) -> None:
        """Start to listen on a free port."""
        self.weights = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec)) for spec in self.specs}
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(lambda: server.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(lambda: server.post(self.path, body))

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _answer(self, call: Callable[[], dict[str, Any]]) -> None:
                try:
                    status, body = 200, call()
                except RefusalError as error:
                    status, body = error.status, {"error": {"message": str(error), "code": error.code}}
                except WeightUpdateError as error:
                    status, body = 400, {"error": {"message": str(error), "code": "weight_update_error"}}
                text = json.dumps(body).encode()
                with suppress(ConnectionError):  # the sender has given up
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

        self._http = ThreadingHTTPServer((self.host, 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://{self.host}:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), name="weight server", daemon=True).start()

    def get(self, path: str) -> dict[str, Any]:
        if path == "/weights":
            return asdict(self.receiver.progress() if self.receiver else Progress())
        return {
            "weight_version": max(self.version, 0),
            "protocol": self.protocol,
            "lineage": self.lineage,
            "content": self.content,
            "backends": ["tcp"],
        }

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._join(body) if path == "/init_process_group" else self._update(body)
        except WeightUpdateError as error:
            with self.changed:
                self.failures.append(str(error))
                self.changed.notify_all()
            raise

    def wait(self, version: int, timeout_s: float) -> bool:
        """Wait for a version; return False after the timeout."""
        with self.changed:
            return self.changed.wait_for(lambda: self.version >= version, timeout_s)

    def close(self) -> None:
        """Stop listening and leave the group."""
        self._http.shutdown()
        self._http.server_close()
        if self.receiver is not None:
            self.receiver.close()

    def _join(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.pop("protocol") != self.protocol:
            raise RefusalError(400, "protocol", "the sender follows another version of the protocol")
        self.at("invited")
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = ProcessGroupReceiver(Invitation(**body))
        self.at("joined")
        return {"rank": self.receiver.rank, "world_size": self.receiver.world_size}

    def _update(self, body: dict[str, Any]) -> dict[str, Any]:
        specs = tuple(map(TensorSpec, body["names"], map(tuple, body["shapes"]), body["dtypes"]))
        own = {spec.name: spec for spec in self.specs}
        if specs:
            for spec in specs:
                if spec != own.get(spec.name):
                    raise RefusalError(400, "weights_do_not_fit", f"tensor {spec.name!r} does not fit the model")
            if self.receiver is None:
                raise WeightUpdateError("there is no process group; POST /init_process_group first")
            self.at("announced")
            for name, tensor in self.receiver.tensors(Announcement(body["version"], specs, body["bucket_bytes"])):
                self.weights[name].copy_(tensor)
                self.at(name)
            self.at("received")
        elif self.content != body["content"]:
            raise RefusalError(409, "content_unknown", f"there are no weights of content {body['content']}")
        with self.changed:
            self.version, self.content, self.lineage = body["version"], body["content"], body["lineage"]
            self.changed.notify_all()
        return {"version": self.version}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the program. `deed`: "kill" or "stop", done at a phase of the `nth` update or invitation."""

    specs: list[list[Any]]  # name, shape, dtype
    phase: str = ""
    deed: str = "kill"
    nth: int = 1
    host: str = "127.0.0.1"


def main() -> None:
    """Run a server until the input ends; write a line to the output after each version."""
    options = ServerOptions(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    left = options.nth

    def at(phase: Phase) -> None:
        nonlocal left
        if phase == options.phase:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL if options.deed == "kill" else signal.SIGSTOP)

    specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in options.specs]
    server = WeightServer(specs, at, host=options.host)
    print(server.url, flush=True)

    def report() -> None:
        seen = -1
        while server.wait(seen + 1, threading.TIMEOUT_MAX):
            seen = server.version
            print(seen, flush=True)

    threading.Thread(target=report, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
