"""Certificates that cannot be used are one line at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from certificates import make_certificate
from midflight.config.serving import ServeConfig
from midflight.errors import RecipeError
from midflight.run.listening import tls_context


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    directory = tmp_path_factory.mktemp("certificates")
    return [make_certificate(directory, name) for name in ("one", "two")]


def test_a_pair_or_one_file_with_both_works(pairs: list[tuple[Path, Path]], tmp_path: Path) -> None:
    (certificate, key), _ = pairs
    both = tmp_path / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    assert tls_context(ServeConfig()) is None
    assert tls_context(ServeConfig(tls_cert_file=certificate, tls_key_file=key))
    assert tls_context(ServeConfig(tls_cert_file=both))


def test_wrong_certificates_are_refused(pairs: list[tuple[Path, Path]], tmp_path: Path) -> None:
    (certificate, key), (_, other_key) = pairs
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    for settings, message in (
        (ServeConfig(tls_cert_file=certificate, tls_key_file=other_key), "cannot be used: KEY_VALUES_MISMATCH"),
        (ServeConfig(tls_cert_file=certificate), "cannot be used: "),
        (ServeConfig(tls_cert_file=junk, tls_key_file=key), "cannot be used: "),
        (ServeConfig(tls_cert_file=certificate, tls_key_file=tmp_path / "none"), "cannot read .*No such file"),
        (ServeConfig(tls_key_file=key), "needs serve.tls_cert_file"),
    ):
        with pytest.raises(RecipeError, match=message):
            tls_context(settings)
