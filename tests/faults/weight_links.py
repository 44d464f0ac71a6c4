"""All connections of a server through proxies, also those that the weights take.

    trainer, rollout process ──► control ──► server: HTTP
    server                   ──► join    ──► the trainer: the addresses of the members are exchanged here
    the previous member      ──► data    ──► server: buckets of weights

Nobody is told: the control proxy puts the port of the join proxy into the invitation to a process group. The join proxy
puts the port of the data proxy into what the server publishes. Every rewritten text keeps its length.
"""

from __future__ import annotations

import itertools
import re

from faults.tcp_proxy import Direction, Place, ProxyLoop, Rewrite, TcpProxy, Ways

# Bytes of a link, beyond those that prove the token: a member repeats a connection that is cut during its proof.
BEYOND_PROOF = 1000

_TRAINER_PORT = re.compile(rb'(?<="master_port":)( ?)(\d{5})\b')
_OWN_PORT = re.compile(rb"(?<=127\.0\.0\.1 )(\d{5})$")
_MEMBER_PORT = re.compile(rb"(?<=\xa4port\xcd)(..)", re.DOTALL)  # in msgpack


class WeightLink:
    """The proxies of one server. `address` is the server's own; all links of a test share `loop`."""

    _indices = itertools.count()

    def __init__(self, loop: ProxyLoop, address: tuple[str, int]) -> None:
        self._loop, self._index = loop, next(self._indices)
        self._control = loop.proxy(address, f"control-{self._index}", self.rewrite_control)
        self._rewrite_answer: Rewrite = lambda direction, chunk: chunk
        self._joins: dict[int, TcpProxy] = {}
        self.joined_with: list[bytes] = []  # messages of the server on its way into process groups
        self._kind = f"data-{self._index}"
        self._data: dict[int, TcpProxy] = {}  # to this member, by the port that it listens on
        self._pairs: dict[tuple[int, int], TcpProxy] = {}  # to other members, by link and port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._control.address[1]}"

    def move(self, address: tuple[str, int]) -> None:
        """Forward new connections to another server."""
        self._control.target = address

    def rewrite_answers(self, rewrite: Rewrite) -> None:
        """Change what the server answers to HTTP requests."""
        self._rewrite_answer = rewrite

    def control(self, text: bytes = b"", direction: Direction = "up", after_bytes: int = 0) -> Place:
        """Place in the requests to the server."""
        return Place(self._control.kind, direction, text, after_bytes)

    def join(self, direction: Direction = "up", after_bytes: int = 0) -> Place:
        """Place in the server's way into a process group."""
        return Place(f"join-{self._index}", direction, after_bytes=after_bytes)

    def data(self, direction: Direction = "up", after_bytes: int = 0) -> Place:
        """Place in the weights; "up": on their way to the server."""
        return Place(self._kind, direction, after_bytes=after_bytes)

    def refuse(self, refuses: bool) -> None:
        """Reset, or accept again, connections to the server's HTTP port."""
        self._control.refuses = refuses

    def rewrite_control(self, direction: Direction, chunk: bytes) -> bytes:
        if direction == "down":
            # The trainer recognizes its group in an answer by its port.
            for port, proxy in list(self._joins.items()):
                chunk = chunk.replace(b"127.0.0.1:%d" % proxy.address[1], b"127.0.0.1:%d" % port)
            return self._rewrite_answer(direction, chunk)
        return _TRAINER_PORT.sub(lambda match: match[1] + self._join_port(int(match[2])), chunk)

    def _join_port(self, port: int) -> bytes:
        if port not in self._joins:
            kind = f"join-{self._index}"
            self._joins[port] = self._loop.proxy(("127.0.0.1", port), kind, self._rewrite_join)
        return _digits(self._joins[port].address[1])

    def _rewrite_join(self, direction: Direction, chunk: bytes) -> bytes:
        if direction == "up":
            self.joined_with.append(chunk)
            return _OWN_PORT.sub(lambda match: self._published(int(match[1])), chunk)
        return _MEMBER_PORT.sub(lambda match: self._read(int.from_bytes(match[1])), chunk)

    def _published(self, port: int) -> bytes:
        """Port that the trainer gets of this member; the other members get one of their own in `_read`."""
        if port not in self._data:
            proxy = self._loop.proxy(("127.0.0.1", port), self._kind)
            self._data[port] = proxy
            _PUBLISHED[proxy.address[1]] = self._index, port
        return _digits(self._data[port].address[1])

    def _read(self, port: int) -> bytes:
        """Port that this member gets of another one."""
        pair = index, real_port = _PUBLISHED.get(port, (-1, port))
        if pair not in self._pairs:
            other = f"data-{index}"
            ways: Ways = {
                "up": {(other, "up"), (self._kind, "down")},
                "down": {(self._kind, "up"), (other, "down")},
            }
            self._pairs[pair] = self._loop.proxy(("127.0.0.1", real_port), self._kind, ways=ways)
        return self._pairs[pair].address[1].to_bytes(2)


_PUBLISHED: dict[int, tuple[int, int]] = {}  # link and the port that the member listens on, by the port published


def _digits(port: int) -> bytes:
    assert port >= 10_000, "the ports of this machine have fewer digits than expected"
    return b"%d" % port
