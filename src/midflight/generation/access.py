"""Identification of clients: the run, by the admin token; a holder of an API key; anyone else.

Secrets are compared as digests in constant time. The file of keys is read again when it changes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from midflight.errors import RecipeError
from midflight.generation.addresses import is_loopback
from midflight.generation.admission import LOCAL

_CHECK_S = 1.0  # between two looks at the file of keys
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Digest of a key, and the time at which it expires (seconds since the epoch); None: never."""

    digest: bytes
    expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of one request. `name`: identity for limits. `credentials`: what its bearer token is."""

    name: str
    is_admin: bool
    credentials: Literal["none", "admin", "key", "expired", "unknown"]


def digest_of(secret: str) -> bytes:
    """Return the digest of a secret. Digests have one length, so a comparison does not reveal the secret's."""
    return hashlib.sha256(secret.encode()).digest()


class KeyFile:
    """API keys of a file: one per line, optionally followed by a space and the time when it expires (ISO 8601, UTC).

    Empty lines and lines that start with # are ignored. If the file becomes unreadable or wrong, the old keys stay
    valid, and a line in the log says so.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file. Raises: RecipeError if it cannot be read, has no key, or a line is not a key."""
        self._path, self._clock = path, clock
        self._seen = self._state()
        self._keys = _read_keys(path)
        self._next_check_s = clock() + _CHECK_S

    def keys(self) -> tuple[ApiKey, ...]:
        """Return the keys, expired ones among them."""
        now_s = self._clock()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + _CHECK_S
            state = self._state()
            if state != self._seen:
                self._seen = state
                try:
                    self._keys = _read_keys(self._path)
                except RecipeError as error:
                    _log.warning("%s; the keys read before stay valid", error)
        return self._keys

    def _state(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _read_keys(path: Path) -> tuple[ApiKey, ...]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(f"serve.api_key_file: cannot read {path}: {reason}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"serve.api_key_file: {path}, line {number}"
        if len(words) > 2:
            raise RecipeError(f"{where} has {len(words)} words, not a key and the time when it expires")
        check_secret(where, words[0])
        keys.append(ApiKey(digest_of(words[0]), _expiry(where, words[1]) if len(words) == 2 else None))
    if not keys:
        raise RecipeError(f"serve.api_key_file: {path} has no key; write one per line")
    return tuple(keys)


def _expiry(where: str, text: str) -> float:
    try:
        time_of_expiry = datetime.fromisoformat(text)
    except ValueError as error:
        raise RecipeError(f"{where}: {text!r} is not a time such as 2027-01-31T12:00:00Z") from error
    return time_of_expiry.replace(tzinfo=time_of_expiry.tzinfo or UTC).timestamp()


def check_secret(where: str, secret: str) -> None:
    """Check that a secret can be sent in a header. Raises: RecipeError."""
    if not secret or not all("!" <= character <= "~" for character in secret):
        raise RecipeError(f"{where} is not a secret of visible ASCII characters without spaces")


class Access:
    """The secrets of a server. Without secrets, every client may do everything."""

    def __init__(
        self,
        admin_token: str | None = None,
        api_keys: Iterable[str] = (),
        key_file: KeyFile | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._admin = None if admin_token is None else digest_of(admin_token)
        self._fixed = tuple(ApiKey(digest_of(key)) for key in api_keys)
        self._file, self._clock = key_file, clock

    @property
    def has_admin_token(self) -> bool:
        return self._admin is not None

    @property
    def has_keys(self) -> bool:
        return bool(self._fixed) or self._file is not None

    def is_key(self, secret: str) -> bool:
        """Return True if this secret is an API key, expired or not."""
        return any(key.digest == digest_of(secret) for key in self._keys())

    def caller(self, headers: Mapping[bytes, bytes], peer: str) -> Caller:
        """Identify the client of a request by its Authorization header; `peer`: its address."""
        stranger = LOCAL if is_loopback(peer) else f"peer {peer}"
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            return Caller(stranger, False, "none")
        given = hashlib.sha256(token.strip()).digest()
        if self._admin is not None and hmac.compare_digest(given, self._admin):
            return Caller("admin", True, "admin")
        matches = [key for key in self._keys() if hmac.compare_digest(given, key.digest)]
        if not matches:
            return Caller(stranger, False, "unknown")
        if all(key.expires_s is not None and key.expires_s <= self._clock() for key in matches):
            return Caller(stranger, False, "expired")
        return Caller(f"key {given.hex()}", False, "key")

    def _keys(self) -> tuple[ApiKey, ...]:
        return self._fixed + (self._file.keys() if self._file else ())
