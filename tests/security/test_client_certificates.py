"""Client certificates, made here: each client needs one in its own name, besides its secret."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from promptfed.client_service.http.coordinator_client import http_to
from promptfed.client_service.joining.doctor import Examination
from promptfed.coordinator.settings import Settings
from promptfed.shared.spec.spec import BackboneSpec
from promptfed.testing.clients import ScriptedClient, bearer, content_digest, enrolment, secret_of, spec
from tests.support.authority import Authority
from tests.support.coordinators import TIMEOUT, InThread


class Site:
    """Calls the coordinator, with a certificate or without."""

    def __init__(self, url: str, authority: Path, certificate: Path | None):
        context = ssl.create_default_context(cafile=str(authority))
        if certificate is not None:
            context.load_cert_chain(certificate)
        self.http = httpx.Client(base_url=url, verify=context, timeout=TIMEOUT)

    def enrol(self, token: str, name: str) -> tuple[int, str]:
        answer = self.http.post("/v1/federations/eyes/clients", json=enrolment(name), headers=bearer(token))
        return answer.status_code, str(answer.json().get("type", "")).rsplit("/", 1)[-1]

    def task(self, name: str) -> int:
        return self.http.get("/v1/federations/eyes/task", headers=bearer(secret_of(name))).status_code


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def coordinator(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    own = authority.sign("localhost", "localhost")
    options = {"tls_cert": own, "tls_key": own, "tls_client_ca": authority.file}
    server = InThread(tmp_path_factory.mktemp("coordinator") / "data", **options)
    server.url = server.url.replace("http://127.0.0.1", "https://localhost")
    server.http = Site(server.url, authority.file, None).http
    server.post("/v1/federations", spec(name="eyes"), status=201)
    yield server
    server.stop()


def test_a_client_needs_a_certificate_of_its_name(coordinator: InThread, authority: Authority, tmp_path: Path) -> None:
    token = coordinator.token("eyes")
    a, b = (Site(coordinator.url, authority.file, authority.sign(name)) for name in "ab")
    by_dns = Site(coordinator.url, authority.file, authority.sign("ward 3 of St. Mary's", "ward-3"))
    nobody = Site(coordinator.url, authority.file, None)
    assert nobody.enrol(token, "a") == (403, "other-certificate")
    assert b.enrol(token, "a") == (403, "other-certificate")
    assert a.enrol(token, "a")[0] == 201
    assert by_dns.enrol(token, "ward-3")[0] == 201
    assert by_dns.enrol(token, "ward-4") == (403, "other-certificate")
    assert [site.task("a") for site in (a, b, by_dns, nobody)] == [204, 403, 403, 403], "its secret alone is not enough"
    stranger = Authority(tmp_path, "stranger")
    forged = Site(coordinator.url, authority.file, stranger.sign("a"))
    with pytest.raises(httpx.TransportError):
        forged.task("a")
    assert coordinator.get("eyes")["clients"]["trainers"] == 2, "operators come by their tokens"
    assert nobody.http.get("/healthz").status_code == 200


def test_the_calls_of_a_round_ask_for_it(coordinator: InThread, authority: Authority) -> None:
    federation = str(coordinator.post("/v1/federations", spec(name="round"), status=201)["id"])
    token, sites = coordinator.token(federation), {}
    for name in ("e", "f"):
        sites[name] = Site(coordinator.url, authority.file, authority.sign(name))
        path = f"/v1/federations/{federation}/clients"
        assert sites[name].http.post(path, json=enrolment(name), headers=bearer(token)).status_code == 201
    sites["nobody"] = Site(coordinator.url, authority.file, None)
    coordinator.post(f"{federation}/start")
    task = coordinator.task(ScriptedClient(sites["e"].http, federation, "e"))
    here = f"/v1/federations/{federation}/tasks/{task['task_id']}"
    calls = [("GET", f"/v1/federations/{federation}/task"), ("GET", f"{here}/payload"), ("PUT", f"{here}/update")]
    for verb, path in [*calls, ("PUT", f"{here}/evaluation")]:
        for name, site in sites.items():
            headers = bearer(secret_of("e")) | {"Content-Digest": content_digest(b"x"), "X-Forwarded-For": "1.2.3.4"}
            options: dict[str, Any] = {"headers": headers, "content": b"x"} if verb == "PUT" else {"headers": headers}
            answer = site.http.request(verb, path, **options)
            assert (answer.status_code == 403) == (name != "e"), (path, name)


def test_the_client_service_shows_its_own(coordinator: InThread, authority: Authority) -> None:
    token = coordinator.token("eyes")
    path = f"{coordinator.url}/v1/federations/eyes/enrolment"

    async def ask(certificate: Path | None) -> int:
        own = None if certificate is None else (certificate, None)
        async with http_to(coordinator.url, authority.file, own) as http:
            return (await http.get(path, headers=bearer(token))).status_code

    assert asyncio.run(ask(authority.sign("c"))) == 200
    assert asyncio.run(ask(None)) == 403


def test_the_doctor_shows_the_clients_own(coordinator: InThread, authority: Authority, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(coordinator.token("eyes"))
    about = {"coordinator": coordinator.url, "federation": "eyes", "enrolment_token_file": token}
    verdicts = {}
    for name, own in (("with", {"client_cert": authority.sign("d")}), ("without", {})):
        examination = Examination.of(BackboneSpec(), **about, ca_file=authority.file, **own)
        examination._federation()
        verdicts[name] = {check.name: check.verdict for check in examination.checks}["coordinator"]
    assert verdicts == {"with": "pass", "without": "fail"}


def test_certificates_are_not_asked_for_without_tls(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="give --tls-cert too"):
        Settings(tls_client_ca=tmp_path / "ca.pem")
