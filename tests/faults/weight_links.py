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

from faults.tcp_proxy import Direction, Place, ProxyLoop, Rewrite, TcpProxy, Ways

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
        self._kind = f"data-{self._index}"
        self._data: dict[int, TcpProxy] = {}  # to this member, by the port that gloo listens on
        self._pairs: dict[tuple[int, int], TcpProxy] = {}  # to the members of later links, by link and port

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
        return Place(self._kind, direction, after_bytes=after_bytes)

    def refuse(self, refuses: bool) -> None:
        """Reset, or accept again, connections to the server's HTTP port."""
        self._control.refuses = refuses

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
        """Address that the trainer gets of this member; the other members get one of their own in `_read`."""
        (port,) = struct.unpack(">H", match[1])
        if port not in self._data:
            proxy = self._loop.proxy(("127.0.0.1", port), self._kind)
            self._data[port] = proxy
            _PUBLISHED[proxy.address[1]] = self._index, port
        return _socket_address(self._data[port].address[1], _CONNECTS)

    def _read(self, match: re.Match[bytes]) -> bytes:
        """Address that this member gets of another one: it connects only to the proxies of later links."""
        (port,) = struct.unpack(">H", match[1])
        index, real_port = _PUBLISHED.get(port, (-1, 0))
        if match[2] != _CONNECTS or index <= self._index:
            return _socket_address(port, _LISTENS)
        pair = index, real_port
        if pair not in self._pairs:
            other = f"data-{index}"
            ways: Ways = {
                "up": {(other, "up"), (self._kind, "down")},
                "down": {(self._kind, "up"), (other, "down")},
            }
            self._pairs[pair] = self._loop.proxy(("127.0.0.1", real_port), self._kind, ways=ways)
        return _socket_address(self._pairs[pair].address[1], _CONNECTS)


_PUBLISHED: dict[int, tuple[int, int]] = {}  # link and the port that gloo listens on, by the port that is published


def _socket_address(port: int, host: bytes) -> bytes:
    return struct.pack("<H", 2) + struct.pack(">H", port) + host + bytes(8)
