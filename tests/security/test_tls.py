"""TLS by flags, with certificates made here."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from promptfed.client_service.http.coordinator_client import http_to
from promptfed.coordinator.__main__ import main
from tests.support.coordinators import ForkedCoordinator

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="TLS tests: apt-get install openssl")


def certificate(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [*new, *names, "-keyout", str(key), "-out", str(cert), *(options or ["-nodes"])]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def health(url: str, ca_file: Path | None) -> int:
    """The status that a client service gets which trusts ``ca_file``, or what the system trusts."""

    async def ask() -> int:
        async with http_to(url, ca_file) as http:
            return (await http.get(f"{url}/healthz")).status_code

    return asyncio.run(ask())


def test_only_who_trusts_the_certificate_speaks_to_it(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "own")
    other, _ = certificate(tmp_path, "other")
    server = ForkedCoordinator(tmp_path / "data", "--tls-cert", str(cert), "--tls-key", str(key))
    try:
        assert server.url.startswith("https://")
        assert health(server.url, cert) == 200
        for trusted in (other, None):
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                health(server.url, trusted)
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/healthz")
    finally:
        server.kill()


@pytest.mark.parametrize("trouble", ["missing", "junk", "another key", "locked key"])
def test_unusable_files_are_one_line(tmp_path: Path, trouble: str, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = certificate(tmp_path, "own")
    if trouble == "missing":
        key.unlink()
    elif trouble == "junk":
        cert.write_text("no certificate")
    elif trouble == "another key":
        _, key = certificate(tmp_path, "other")
    else:
        cert, key = certificate(tmp_path, "locked", "-passout", "pass:secret")
    options = ["--data-dir", str(tmp_path / "data"), "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)]
    assert main(options) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("coordinator:")]
    assert f"--tls-cert {cert} and --tls-key {key} cannot be used: " in line
