"""IP addresses of clients and servers."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_address(text: str) -> Address:
    """Parse an address; an IPv4 address in an IPv6 one becomes an IPv4 address. Raises: ValueError."""
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Return True for a loopback address and for `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
