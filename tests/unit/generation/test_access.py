"""Identification of clients by the Authorization header, with keys that rotate and expire."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.errors import RecipeError
from midflight.generation.access import Access, Caller, KeyFile


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def bearer(access: Access, token: str, scheme: str = "Bearer") -> Caller:
    return access.caller({b"authorization": f"{scheme} {token}".encode()}, "10.0.0.1")


def test_secrets_tell_who_a_client_is() -> None:
    access = Access("sesame", ["open", "shut"])
    assert bearer(access, "sesame") == Caller("admin", True, "admin")
    assert bearer(access, "open", "bearer").credentials == "key"
    assert bearer(access, "open").name != bearer(access, "shut").name, "limits are for each key"
    for caller in (bearer(access, "wrong"), bearer(access, "open", "Basic"), access.caller({}, "10.0.0.1")):
        assert (caller.name, caller.is_admin, caller.credentials in ("unknown", "none")) == (
            "peer 10.0.0.1",
            False,
            True,
        )


def test_keys_rotate_without_a_restart(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("# our team\n\nold-key\n")
    access = Access(None, key_file=KeyFile(path, clock))
    assert bearer(access, "old-key").credentials == "key"
    path.write_text("newer-key\n")
    clock.now_s += 2
    assert [bearer(access, key).credentials for key in ("old-key", "newer-key")] == ["unknown", "key"]
    path.write_text("three words here\n")
    clock.now_s += 2
    assert bearer(access, "newer-key").credentials == "key", "a wrong file changes nothing"


def test_expired_keys_are_recognized(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("short 1970-01-01T00:01:00Z\nlong 1970-01-01T01:01:00+01:00\nnaive 1970-01-01T00:01:00\n")
    access = Access(None, key_file=KeyFile(path), clock=clock)
    for key in ("short", "long", "naive"):
        clock.now_s = 59.0
        assert bearer(access, key).credentials == "key"
        clock.now_s = 60.0
        assert bearer(access, key).credentials == "expired"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key; write one per line"),
        ("a b c\n", "line 1 has 3 words"),
        ("good\nkey tomorrow\n", "line 2: 'tomorrow' is not a time such as"),
        ("clé\n", "line 1 is not a secret of visible ASCII characters"),
    ],
)
def test_wrong_key_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        KeyFile(path)
