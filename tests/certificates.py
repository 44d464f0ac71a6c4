"""Self-signed certificates."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Create a self-signed certificate of localhost, and its key."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key
