"""All connections of a server through proxies, also those that the weights take.

    trainer, rollout process ──► control ──► server: HTTP
    server                   ──► store   ──► the trainer's store: gloo's addresses are exchanged here
    other members            ──► data    ──► server: buckets of weights, in both directions

Nobody is told: the control proxy puts the port of the store proxy into the invitation to a process group. The store
proxy puts the address of the data proxy into what the server publishes. Every rewritten text keeps its length.
"""

from __future__ import annotations

import itertools
import re
import struct

from faults.tcp_proxy import Direction, Place, ProxyLoop, Rewrite, TcpProxy

_STORE_PORT = re.compile(rb'(?<="master_port":)( ?)(\d{5})\b')
_SOCKET_ADDRESS = re.compile(rb"\x02\x00(..)(\x7f\x00\x00\x01|\x00\x00\x00\x00)\x00{8}", re.DOTALL)
_LOOPBACK = bytes([127, 0, 0, 1])
# Of two members, the one whose own address is larger connects to the other. Real addresses are 127.0.0.1.
_CONNECTS = bytes([0, 0, 0, 0])  # smaller, and reaches this machine as well
_LISTENS = bytes([127, 0, 0, 9])  # larger; no member ever connects to it


class WeightLink:
    """The proxies of one server. `address` is the server's own; all links of a test share `loop`."""

    _indices = itertools.count()

    def __init__(self, loop: ProxyLoop, address: tuple[str, int]) -> None:
        self._loop, self._index = loop, next(self._indices)
        self._control = loop.proxy(address, f"control-{self._index}", self.rewrite_control)
        self._rewrite_answer: Rewrite = lambda direction, chunk: chunk
        self._stores: dict[int, TcpProxy] = {}
        self._data: dict[bytes, TcpProxy] = {}  # by the port that gloo listens on, as in a socket address

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

    def store(self, direction: Direction = "up", after_bytes: int = 0) -> Place:
        """Place between the server and the store of the process group."""
        return Place(f"store-{self._index}", direction, after_bytes=after_bytes)

    def data(self, direction: Direction = "up", after_bytes: int = 0) -> Place:
        """Place in the weights; "up": on their way to the server."""
        return Place(f"data-{self._index}", direction, after_bytes=after_bytes)

    def refuse(self, refuses: bool) -> None:
        """Reset, or accept again, connections to the server's HTTP port."""
        self._control.refuses = refuses

    def refuse_data(self, refuses: bool) -> None:
        """Reset, or accept again, connections that would carry weights; holds for the groups formed so far."""
        for proxy in self._data.values():
            proxy.refuses = refuses

    def rewrite_control(self, direction: Direction, chunk: bytes) -> bytes:
        if direction == "down":
            # The trainer recognizes its group in an answer by the port of its store.
            for port, proxy in list(self._stores.items()):
                chunk = chunk.replace(b"127.0.0.1:%d" % proxy.address[1], b"127.0.0.1:%d" % port)
            return self._rewrite_answer(direction, chunk)
        return _STORE_PORT.sub(lambda match: match[1] + b"%05d" % self._store_port(int(match[2])), chunk)

    def _store_port(self, port: int) -> int:
        if port not in self._stores:
            kind = f"store-{self._index}"
            self._stores[port] = self._loop.proxy(("127.0.0.1", port), kind, self._rewrite_store)
        proxy_port = self._stores[port].address[1]
        assert len(str(proxy_port)) == 5, "the ports of this machine have fewer digits than expected"
        return proxy_port

    def _rewrite_store(self, direction: Direction, chunk: bytes) -> bytes:
        return _SOCKET_ADDRESS.sub(self._published if direction == "up" else self._read, chunk)

    def _published(self, match: re.Match[bytes]) -> bytes:
        """Address that the other members get of this one: the data proxy."""
        port = match[1]
        if port not in self._data:
            target = ("127.0.0.1", struct.unpack(">H", port)[0])
            proxy = self._loop.proxy(target, f"data-{self._index}")
            self._data[port] = proxy
            _OWNERS[proxy.address[1]] = self._index
        return _socket_address(self._data[port].address[1], _CONNECTS)

    def _read(self, match: re.Match[bytes]) -> bytes:
        """Address that this member gets of another one: it connects only to a proxy of a later link."""
        (port,) = struct.unpack(">H", match[1])
        connects = match[2] == _CONNECTS and _OWNERS.get(port, -1) > self._index
        return match[0] if connects else _socket_address(port, _LISTENS)


_OWNERS: dict[int, int] = {}  # index of the link by the port of its data proxy


def _socket_address(port: int, host: bytes) -> bytes:
    return struct.pack("<H", 2) + struct.pack(">H", port) + host + bytes(8)
