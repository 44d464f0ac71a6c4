"""Checks of the headers Host and Origin: against DNS rebinding, and against pages of other sites.

A page can make a browser send requests to any address. Its name is then in Origin, and in Host if its DNS name has been
pointed at this server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from starlette.types import Scope

from midflight.generation.addresses import Address, parse_address
from midflight.generation.http_errors import ApiError

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
ANY = "*"


class HostRules:
    """Hosts and origins that requests may name.

    Always allowed: the address that the connection was made to, and `localhost` if this is a loopback address.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        """`hosts`: further names or addresses, without ports; `*`: all. `origins`: such as https://example.com."""
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    def refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Return the error for a request whose Host or Origin is not allowed, or None."""
        given = headers.get(b"host", b"").decode("latin-1")
        if given and ANY not in self._hosts and not self._is_own(_name_of(given), scope):
            return ApiError(
                421, f"the header Host: {given} does not name this server; add the name to serve.allowed_hosts"
            )
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and scope.get("method", "POST") not in _SAFE_METHODS and not self._is_allowed(origin, given):
            return ApiError(403, f"requests of pages of {origin} are refused; see serve.allowed_origins")
        return None

    def _is_own(self, name: str, scope: Scope) -> bool:
        if name in self._hosts:
            return True
        address = _address(scope["server"][0]) if scope.get("server") else None
        return address is not None and (_address(name) == address or (name == "localhost" and address.is_loopback))

    def _is_allowed(self, origin: str, host: str) -> bool:
        """True for a page of this server itself, and for the origins that the recipe allows."""
        return origin in self._origins or (bool(host) and urlsplit(origin).netloc == host.lower())


def _name_of(host: str) -> str:
    """Return the name or address in a Host header, without the port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _address(text: str) -> Address | None:
    try:
        return parse_address(text)
    except ValueError:
        return None
