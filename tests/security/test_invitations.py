"""Whom a client trusts that was invited: the certificate that the invitation names, and no other."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from promptfed.cli.app import exit_code
from promptfed.cli.main import app
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.coordinator_client import CoordinatorClient, open_http
from promptfed.client_service.joining.invited import AUTHORITY, accept
from promptfed.coordinator.domain import clock
from promptfed.sdk import operations
from promptfed.sdk.client import CA_VARIABLE, Coordinator
from promptfed.shared.errors import PromptfedError
from promptfed.shared.messages import EnrolmentInfo
from promptfed.shared.service.invitation import Invitation, decode
from promptfed.shared.service.net import certificate_hash
from promptfed.testing.clients import spec
from tests.security.test_tls import certificate
from tests.support.coordinators import ForkedCoordinator

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="TLS tests: apt-get install openssl")

TOKEN = "ab" * 32


@contextmanager
def imitation(
    folder: Path, body: str, damaged: int = 0, headers: Mapping[str, str] = {}
) -> Iterator[tuple[str, list[str]]]:
    """A server with a certificate of its own, which always answers ``body``; its address and what it was sent.

    ``damaged``: answers before that have another body, or no such encoding as ``headers`` say.
    """
    cert, key = certificate(folder, "imitation")
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(f"{self.requestline}\n{self.headers}")
            self.send_response(200)
            early = len(seen) <= damaged
            for name, value in headers.items() if early else ():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write((body[:-9] if early else body).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def invitation(url: str, authority: str, hours: float = 1.0) -> str:
    expires = clock.parse(clock.now()) + timedelta(hours=hours)
    given = {"federation": "pets", "token": TOKEN, "expires_at": expires, "authority": authority}
    return Invitation(coordinator=url, **given).encoded()


@pytest.mark.extended
def test_who_is_invited_trusts_the_own_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = certificate(tmp_path, "own")
    server = ForkedCoordinator(tmp_path / "data", "--tls-cert", str(cert), "--tls-key", str(key))
    try:
        monkeypatch.setenv(CA_VARIABLE, str(cert))
        with Coordinator(server.url, (tmp_path / "data" / "operator.token").read_text().strip()) as api:
            api.run(operations.create(spec(name="pets")))
            asked = {"name": "ward-3", "role": "evaluator", "address": server.url}
            minted = api.send(operations.mint_token("pets", **asked)).view
            for_two = api.send(operations.mint_token("pets", uses=2, **asked | {"name": "wards"})).view
        assert minted.invitation is not None
        decoded = decode(minted.invitation)
        assert decoded.authority == certificate_hash(cert.read_text())
        assert (decoded.token, decoded.expires_at) == (minted.token, minted.expires_at)
        state = tmp_path / "state"
        settings = accept(minted.invitation, {"data": "symbols:sketch", "state_dir": state})
        assert settings.ca_file == state / AUTHORITY
        assert (settings.name, settings.role) == ("ward-3", "evaluator")
        assert for_two.invitation is not None
        assert decode(for_two.invitation).client is None, "two clients cannot have one name"
        own = accept(
            minted.invitation, {"data": "symbols:sketch", "state_dir": state, "name": "eyes", "role": "trainer"}
        )
        assert (own.name, own.role) == ("eyes", "trainer"), "what the owner says counts"
        assert settings.enrolment_token_file.stat().st_mode & 0o777 == 0o600

        async def ask() -> EnrolmentInfo:
            async with open_http(settings) as http:
                token = settings.enrolment_token_file.read_text().strip()
                client = CoordinatorClient(http, settings.coordinator, settings.federation, 5.0, token)
                return await client.ask(EnrolmentInfo, "enrolment")

        assert asyncio.run(ask()).name == "pets"
    finally:
        server.kill()
    again = accept(minted.invitation, {"data": "symbols:sketch", "state_dir": state})
    assert again == settings, "the kept certificate is enough: nobody is asked"


@pytest.mark.parametrize("answer", ["its own", "both", "junk"])
def test_another_certificate_is_not_trusted_and_learns_nothing(tmp_path: Path, answer: str) -> None:
    named, _ = certificate(tmp_path, "named")
    own, _ = certificate(tmp_path, "imitation")
    body = {"its own": own.read_text(), "both": named.read_text() + own.read_text(), "junk": "no certificate"}[answer]
    state = tmp_path / "state"
    with imitation(tmp_path, body) as (url, seen):
        text = invitation(url, certificate_hash(named.read_text()))
        if answer == "both":  # The right one is kept, without what came with it.
            settings = accept(text, {"data": "symbols:sketch", "state_dir": state})
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                asyncio.run(open_http(settings).get(url))
        else:
            with pytest.raises(ClientError, match="does not show the certificate that the invitation names") as refusal:
                accept(text, {"data": "symbols:sketch", "state_dir": state})
            assert refusal.value.exit == Exit.NOT_ALLOWED
            assert not (state / AUTHORITY).exists()
    assert seen
    assert not any(TOKEN in request or "uthorization" in request for request in seen)


@pytest.mark.extended
def test_invitations_that_cannot_be_accepted_are_refused_in_one_line(tmp_path: Path) -> None:
    given = ["--data", "symbols:sketch", "--state-dir", str(tmp_path / "state")]
    expired = invitation("https://127.0.0.1:9", "0f" * 32, hours=-1)
    wrong = {
        expired: (Exit.NOT_ALLOWED, "the invitation expired at "),
        expired[:-9]: (Exit.NOT_ALLOWED, "the invitation is incomplete or was changed: copy the whole text again"),
        invitation("http://coordinator.example", "0f" * 32): (
            Exit.USAGE,
            "would carry the client's secret unencrypted",
        ),
        invitation("https://127.0.0.1:9", "0f" * 32): (Exit.UNREACHABLE, "https://127.0.0.1:9: nothing listens there"),
    }
    for text, (code, told) in wrong.items():
        for arguments, line in (([text], ""), (["-"], f"{text}\n")):
            result = CliRunner().invoke(app, ["join", *arguments, *given], input=line)
            assert result.exit_code == code
            [said] = result.stderr.splitlines()
            assert told in said
    assert not (tmp_path / "state" / "identity.json").exists()


def test_a_client_that_has_enrolled_joins_again_after_the_invitation_has_expired(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "identity.json").write_text('{"name": "ward-3", "client_id": "cli-1"}')
    given = {"federation": "pets", "token": TOKEN, "expires_at": clock.parse(clock.now())}
    text = Invitation(coordinator="https://127.0.0.1:9", **given).encoded()
    settings = accept(text, {"data": "symbols:sketch", "state_dir": state})
    assert (settings.name, settings.ca_file) == ("ward-3", None)


def test_tls_where_none_is_expected_and_the_reverse_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in the client and in the operator's commands, which stop at once."""
    monkeypatch.delenv(CA_VARIABLE, raising=False)

    def told(url: str, ca_file: Path | None = None) -> str:
        with pytest.raises(PromptfedError) as refusal, Coordinator(url, TOKEN) as api:
            api.send(operations.get_federation("pets"))
        assert exit_code(refusal.value) == Exit.UNREACHABLE

        given = {"coordinator": url, "federation": "pets", "data": "none", "state_dir": tmp_path, "ca_file": ca_file}

        async def ask() -> None:
            from promptfed.client_service.settings import make_settings

            async with open_http(make_settings(**given)) as http:
                await CoordinatorClient(http, url, "pets", 3600.0, TOKEN).ask(EnrolmentInfo, "enrolment")

        with pytest.raises(ClientError) as ended:
            asyncio.run(asyncio.wait_for(ask(), 20))
        assert str(ended.value) == str(refusal.value)
        assert ended.value.exit == Exit.UNREACHABLE
        return str(refusal.value)

    with imitation(tmp_path, "{}") as (url, _):
        plain = url.replace("https", "http")
        assert told(plain) == f"{plain} speaks TLS: use {url}"
        text = f"the certificate of {url} is not signed by an authority that this machine trusts"
        assert told(url) == f"{text}: give the authority's certificate with --ca-file"
        assert told(url.replace("127.0.0.1", "localhost")).startswith("the certificate of https://localhost:")
