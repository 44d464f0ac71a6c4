"""Hosts that a server takes weights from."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from midflight.generation.addresses import Address, parse_address
from midflight.generation.http_errors import ApiError
from midflight.weights.process_group import addresses_of

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class WeightHosts:
    """Rule for the hosts of invitations. `networks`: None allows the client that sends the invitation only."""

    networks: Sequence[Network] | None = None

    def address_of(self, host: str, port: int, client: str | None) -> str:
        """Return the address of a host that is allowed. It must be used as it is: the name may get another address.

        `client`: address of the client that has sent the invitation; None if it has no address.
        Raises: WeightUpdateError if the host has no address, ApiError 403 if none is allowed.
        """
        addresses = addresses_of(host, port)
        for address in addresses:
            if self._allows(parse_address(address), client):
                return address
        source = f"this invitation comes from {client}, and " if self.networks is None else ""
        raise ApiError(
            403,
            f"{source}this server does not take weights from {addresses[0]}; add this address to serve.weight_hosts",
            param="master_address",
        )

    def _allows(self, address: Address, client: str | None) -> bool:
        if self.networks is not None:
            return any(address in network for network in self.networks)
        try:
            sender = parse_address(client or "127.0.0.1")
        except ValueError:
            return False
        return address == sender or (address.is_loopback and sender.is_loopback)
