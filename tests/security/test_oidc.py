"""Operators who come with a token of an OpenID Connect issuer's: a real one, over loopback HTTP, with its keys."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from pydantic import ValidationError

from promptfed.coordinator.http import oidc
from promptfed.coordinator.problems import IssuerAway
from promptfed.coordinator.settings import Settings
from promptfed.testing.clients import bearer, content_digest, spec, trained, update_body
from tests.support.coordinators import InThread, in_thread
from tests.support.open_phases import open_first_phase

AUDIENCE = "promptfed"


class RealIssuer:
    """Publishes its configuration and keys, and signs tokens."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {
            "rsa": rsa.generate_private_key(public_exponent=65537, key_size=2048),
            "ec": ec.generate_private_key(ec.SECP256R1()),
        }
        self.stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.asked = 0
        self.away = False
        self.trickle = False
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                body = issuer.answer(self.path)
                self.send_response(503 if issuer.away or body is None else 200)
                self.end_headers()
                for byte in json.dumps(body).encode():
                    if issuer.trickle:
                        time.sleep(0.2)
                    self.wfile.write(bytes([byte]))

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> Any:
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        published = []
        for kid, key in self.keys.items():
            algorithm = jwt.algorithms.RSAAlgorithm if kid.startswith("rsa") else jwt.algorithms.ECAlgorithm
            published.append(json.loads(algorithm.to_jwk(key.public_key())) | {"kid": kid, "use": "sig"})
        return {"keys": published} if path == "/keys" else None

    def token(self, kid: str = "rsa", algorithm: str = "RS256", key: Any = None, **changes: Any) -> dict[str, str]:
        now = int(time.time())
        claims = {"iss": self.url, "aud": AUDIENCE, "sub": "anna", "exp": now + 600, "roles": ["promptfed-operator"]}
        claims = {name: value for name, value in (claims | changes).items() if value is not None}
        return bearer(jwt.encode(claims, key or self.keys[kid], algorithm, headers={"kid": kid}))


@pytest.fixture(scope="module")
def issuer() -> Iterator[RealIssuer]:
    made = RealIssuer()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def coordinator(issuer: RealIssuer, tmp_path: Path) -> Iterator[InThread]:
    options = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE, "auth_failures_per_minute": 1000}
    with in_thread(tmp_path / "data", **options) as made:
        yield made


def test_a_token_of_the_issuer_s_gives_its_role(coordinator: InThread, issuer: RealIssuer) -> None:
    http = coordinator.http
    assert http.post("/v1/federations", json=spec(), headers=issuer.token()).status_code == 201
    by_curve = issuer.token("ec", "ES256", roles="promptfed-viewer")
    assert http.get("/v1/federations/eyes", headers=by_curve).status_code == 200
    assert http.delete("/v1/federations/eyes", headers=by_curve).status_code == 403
    assert http.get("/v1/audit-log", headers=issuer.token()).status_code == 403
    admin = issuer.token(roles=["staff", "promptfed-viewer", "promptfed-admin"], sub="otto")
    [entry] = http.get("/v1/audit-log", headers=admin).json()["entries"]
    assert (entry["actor"], entry["role"]) == ("oidc:anna", "operator")
    assert coordinator.get("eyes")["state"] == "enrolling", "the data folder's token goes on working"


def test_what_is_not_to_be_believed_is_not(coordinator: InThread, issuer: RealIssuer) -> None:
    public = (
        issuer.keys["rsa"]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    header = {"kid": "rsa"}
    claims = jwt.decode(issuer.token()["Authorization"].split()[1], options={"verify_signature": False})
    body = jwt.encode(claims, "x" * 32, "HS256", headers=header).split(".")
    # By hand: the library itself signs with no PEM as an HMAC key.
    signed = f"{body[0]}.{body[1]}".encode()
    confused = base64.urlsafe_b64encode(hmac.new(public, signed, hashlib.sha256).digest()).rstrip(b"=").decode()
    unsigned = jwt.encode(claims, None, "none", headers=header)
    right = issuer.token()["Authorization"].split()[1]
    wrong = {
        "HMAC with the public key": bearer(f"{body[0]}.{body[1]}.{confused}"),
        "no signature": bearer(unsigned),
        "a cut signature": bearer(right[:-10]),
        "another's claims": bearer(".".join([right.split(".")[0], body[1][:-2] + "AA", right.split(".")[2]])),
        "a stranger's key": issuer.token(key=issuer.stranger),
        "another key of the issuer's": issuer.token("rsa", "ES256", key=issuer.keys["ec"]),
        "a key that nobody has": issuer.token("nobody", key=issuer.stranger),
        "another audience": issuer.token(aud="another"),
        "no audience": issuer.token(aud=None),
        "another issuer": issuer.token(iss="http://127.0.0.1:1"),
        "no end": issuer.token(exp=None),
        "nobody's": issuer.token(sub=None),
        "not yet": issuer.token(nbf=int(time.time()) + 3600),
        "no JWT": bearer("a.b.c"),
    }
    for what, headers in wrong.items():
        answer = coordinator.http.get("/v1/federations", headers=headers)
        assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (401, "unauthorized"), what
    expired = coordinator.http.get("/v1/federations", headers=issuer.token(exp=int(time.time()) - 3600))
    assert (expired.status_code, expired.json()["type"].rsplit("/", 1)[-1]) == (401, "token-expired")
    roleless = coordinator.http.get("/v1/federations", headers=issuer.token(roles=["admin", "operator"]))
    assert (roleless.status_code, "promptfed-viewer" in roleless.json()["detail"]) == (403, True)
    assert issuer.asked < 12, "keys are not asked for again with each token"


def test_an_issuer_that_is_away_keeps_nobody_else_out(coordinator: InThread, issuer: RealIssuer) -> None:
    issuer.away = True
    try:
        for _ in range(2):
            answer = coordinator.http.get("/v1/federations", headers=issuer.token())
            assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (503, "issuer-away")
        assert coordinator.get("/v1/federations")["federations"] == []
    finally:
        issuer.away = False


def test_a_path_leads_to_the_roles(issuer: RealIssuer, tmp_path: Path) -> None:
    options = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE, "oidc_role_claim": "realm_access.roles"}
    with in_thread(tmp_path / "data", **options, oidc_role_prefix="pf:") as coordinator:
        nested = issuer.token(roles=None, realm_access={"roles": ["pf:viewer"]})
        assert coordinator.http.get("/v1/federations", headers=nested).status_code == 200
        assert coordinator.http.get("/v1/federations", headers=issuer.token()).status_code == 403


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"oidc_issuer": "https://login.example.org"}, "--oidc-audience"),
        ({"oidc_issuer": "http://login.example.org", "oidc_audience": "a"}, "must be https"),
        ({"oidc_issuer": "file:///etc/keys", "oidc_audience": "a"}, "must be https"),
    ],
)
def test_settings_that_would_not_be_safe_are_refused(options: dict[str, str], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Settings(**options)


@pytest.mark.parametrize("exp", ["9999999999", True, [9999999999], {"at": 1}, 1e300, 1 << 70, "soon"])
def test_an_end_of_any_other_type_is_refused(coordinator: InThread, issuer: RealIssuer, exp: Any) -> None:
    answer = coordinator.http.get("/v1/federations", headers=issuer.token(exp=exp))
    assert answer.status_code == 401, answer.text


@pytest.mark.parametrize("subject", ["", "  "])
def test_a_token_of_nobody_is_refused(coordinator: InThread, issuer: RealIssuer, subject: str) -> None:
    answer = coordinator.http.get("/v1/federations", headers=issuer.token(sub=subject))
    assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (401, "unauthorized")


def test_a_slow_issuer_holds_up_nobody_and_has_a_deadline_for_the_whole(
    coordinator: InThread, issuer: RealIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends a byte at a time, so that no single read takes long; 64 callers wait while an update comes in parts."""
    monkeypatch.setattr(oidc, "FETCH_SECONDS", 2.0)
    issuer.trickle = True
    try:
        headers, began = issuer.token(), time.monotonic()

        def ask(_: int) -> int:
            return httpx.get(f"{coordinator.url}/v1/federations", headers=headers, timeout=60).status_code

        with ThreadPoolExecutor(64) as callers:
            answers = callers.map(ask, range(64))
            time.sleep(0.5)
            before = time.monotonic()
            _, (a, _), (task, _) = open_first_phase(coordinator)
            body = update_body(trained(a.payload(task), "a", task), task)
            whole = {"Content-Digest": content_digest(body), **a.headers}
            path = f"{coordinator.url}{a.path}/tasks/{task['task_id']}/update"
            sent = httpx.put(path, content=body, headers=whole, timeout=60)
            assert sent.status_code == 201, sent.text
            upload_seconds = time.monotonic() - before
            assert set(answers) == {503}
        assert time.monotonic() - began < 20, "all of it would take three minutes at this pace"
        assert upload_seconds < 15
    finally:
        issuer.trickle = False


def test_a_fetch_that_fails_after_its_deadline_logs_no_unretrieved_error(
    issuer: RealIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "FETCH_SECONDS", 0.3)
    monkeypatch.setattr(issuer, "trickle", True)
    asker = oidc.Issuer(issuer.url, AUDIENCE, "roles", "promptfed-")
    complaints: list[dict[str, Any]] = []

    async def fetch_too_late() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        with pytest.raises(IssuerAway):
            await asker._fetch()
        assert asker._fetching is not None
        assert isinstance(await asyncio.to_thread(asker._fetching.exception, 20), TimeoutError)
        await asyncio.sleep(0.1)  # The loop takes over what the thread has found.
        asker._fetching = None  # As the next fetch does.
        gc.collect()

    asyncio.run(fetch_too_late())
    assert complaints == []
