"""The section [serve] of a recipe: options of `midflight serve`."""

from __future__ import annotations

from pathlib import Path

import pydantic
from pydantic import Field

from midflight.config.section import Section


class ServeConfig(Section):
    """Options of `midflight serve`, which serves the model over HTTP."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address to listen on; any address except loopback needs admin_token and an API key",
    )
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0: any free port")
    admin_token: pydantic.SecretStr | None = Field(
        None,
        exclude=True,  # secrets must not be written to a run directory
        description="token that weight updates, abort, pause, resume and the rollouts of a run require; default:"
        " $MIDFLIGHT_ADMIN_TOKEN, or none",
    )
    api_key: pydantic.SecretStr | None = Field(
        None,
        exclude=True,
        description="key that all routes but /health require, if they do not need the admin token; default:"
        " $MIDFLIGHT_API_KEY, or none",
    )
    api_key_file: Path | None = Field(
        None,
        description="file of further API keys, read again when it changes: one key per line, optionally followed by the"
        " time when it expires, such as 2027-01-31T12:00:00Z",
    )
    tls_cert_file: Path | None = Field(
        None, description="certificate chain of the server (PEM); with it, the server speaks HTTPS only"
    )
    tls_key_file: Path | None = Field(
        None, description="private key of tls_cert_file (PEM); default: the key is in tls_cert_file"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="further names under which clients may address the server (header Host, without port); *: all;"
        " always allowed: the address of the connection, the name of the machine and, on loopback, localhost",
    )
    allowed_origins: tuple[str, ...] = Field(
        (), description="sites such as https://example.com whose pages may send requests and read the answers"
    )
    weight_hosts: tuple[pydantic.IPvAnyNetwork, ...] | None = Field(
        None,
        description="addresses or networks of trainers whose weights the server takes; default: the address that the"
        " request to join comes from",
    )
    model_name: str | None = Field(
        None, min_length=1, description="name of the model in requests; default: the name of its directory"
    )
    num_in_flight: int = Field(64, ge=1, description="sequences in flight; more requests wait")
    max_samples: int = Field(128, ge=1, description="largest number of samples (n) in one request")
    max_body_bytes: int = Field(4 << 20, ge=1, description="largest request body, bytes")
    max_queue: int = Field(
        1024,
        ge=1,
        description="sequences of all clients but the run in flight or waiting; more are refused with 429; every 1024"
        " tokens of a prompt count as one more",
    )
    max_queue_per_client: int = Field(
        256, ge=1, description="the same for one API key, or else for one address of another machine"
    )
    max_connections: int = Field(
        1024, ge=1, description="connections of all clients but the run; an idle one is closed for a new one"
    )
    max_connections_per_client: int = Field(
        128, ge=1, description="the same for one address; does not apply to addresses of this machine"
    )
    client_timeout_s: float = Field(
        20.0, gt=0, description="longest time for sending a head or a body, or for reading a part of an answer, seconds"
    )
