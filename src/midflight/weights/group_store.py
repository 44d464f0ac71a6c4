"""Keys and values that the ranks of a NCCL group exchange. They live in the trainer.

engine     waits for: the answer to a question, over a connection whose both ends know the group's token
trainer    waits for: the next question, in a thread for each connection; a key
           unblocked by: the question, the key, the timeout; a connection that ends
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from midflight.weights.group_peers import end_connection, receive_message, send_message

_Question = tuple[dict[str, bytes], list[str], float]  # values to set; keys to wait for, for so long (seconds)


class GroupStore(Store):
    """Part that is common to both ends. Raises: TimeoutError from `get` and `wait` if a key is not set in time."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._exchange({key: value}, [], 0.0)

    def get(self, key: str) -> bytes:
        return self._await([key], self._timeout_s)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return self._exchange({}, keys, 0.0) is not None

    def _await(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        values = self._exchange({}, keys, timeout_s)
        if values is None:
            raise TimeoutError(f"another rank was not ready within {timeout_s:g} s")
        return values

    def _exchange(self, values: Mapping[str, bytes], keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        """Set `values`, then return the values of `keys`; None if one of them is not set in time."""
        raise NotImplementedError

    def close(self) -> None:
        """End the connections; questions under way fail."""
        raise NotImplementedError


class TrainerStore(GroupStore):
    """The store itself."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []

    def serve(self, connection: socket.socket) -> None:
        """Answer the questions of one engine, in a thread, until its connection ends."""
        self._connections.append(connection)
        threading.Thread(target=self._answer, args=(connection,), name="weights group store", daemon=True).start()

    def _exchange(self, values: Mapping[str, bytes], keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        with self._changed:
            self._values.update(values)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._values.keys() >= set(keys), timeout_s):
                return None
            return [self._values[key] for key in keys]

    def close(self) -> None:
        for connection in self._connections:
            end_connection(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                while True:
                    send_message(connection, self._exchange(*receive_message(connection, _Question)))
            except (OSError, EOFError):
                return


class EngineStore(GroupStore):
    """The store as an engine reaches it. Raises: OSError or EOFError once the connection has ended."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._connection, self._asking = connection, threading.Lock()

    def close(self) -> None:
        end_connection(self._connection)
        with self._asking:
            self._connection.close()

    def _exchange(self, values: Mapping[str, bytes], keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        with self._asking:
            send_message(self._connection, (dict(values), list(keys), timeout_s))
            answer: list[bytes] | None = receive_message(self._connection, list[bytes] | None)
            return answer
