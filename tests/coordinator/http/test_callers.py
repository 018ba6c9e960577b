"""What is kept of tokens, and how requests are refused; who may do what is in tests/security/test_access_table.py."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from promptfed.coordinator import problems
from promptfed.coordinator.app import create_app, lifespan
from promptfed.coordinator.http import deps
from promptfed.coordinator.http.json_bodies import NOTHING, JsonBody
from promptfed.coordinator.server import _bind
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.backend import CannotOpen
from promptfed.coordinator.store.signing import Signer
from promptfed.shared.canonical import is_signed, statement
from promptfed.testing.clients import bearer, content_digest, enrolment, secret_of, spec, update_body
from tests.support.coordinators import InThread, Make, in_thread
from tests.support.open_phases import completed
from tests.support.waiting import PATIENCE


@pytest.fixture
def tokens(coordinator: InThread) -> dict[str, str]:
    """A good token of each kind."""
    mine, other = coordinator.create(name="mine"), coordinator.create(name="other")
    coordinator.enrol(mine, "a")
    coordinator.enrol(other, "stranger")
    return {
        "operator": coordinator.operator["Authorization"].split()[1],
        "enrolment": coordinator.token(mine),
        "client": secret_of("a"),
        "client elsewhere": secret_of("stranger"),
    }


def test_the_operator_token_is_made_once_and_only_its_owner_can_read_it(coordinator_with: Make, tmp_path: Path) -> None:
    first = coordinator_with()
    path = tmp_path / "data" / "operator.token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().strip()) == 64
    token = path.read_text()
    first.stop()
    again = coordinator_with()
    assert path.read_text() == token
    again.get("/v1/federations")


def test_tokens_are_not_kept_as_they_are(coordinator: InThread, tokens: dict[str, str], tmp_path: Path) -> None:
    coordinator.registry.last_seen.flush()
    stored = b"".join(file.read_bytes() for file in (tmp_path / "data").glob("coordinator.sqlite3*"))
    assert b"stranger" in stored
    for name in ("enrolment", "client", "operator", "client elsewhere"):
        assert tokens[name].encode() not in stored, name


@pytest.mark.parametrize("header", [[], [(b"authorization", b"Basic YTpi")], [(b"authorization", b"Bearer ")]])
def test_nothing_is_read_of_a_body_without_a_token(header: list[tuple[bytes, bytes]]) -> None:
    async def receive() -> Any:
        raise AssertionError("the body was asked for")

    body = JsonBody({"type": "http", "headers": header}, receive, 1.0)
    assert asyncio.run(body()) == NOTHING


def test_malformed_headers_are_no_tokens(coordinator: InThread) -> None:
    for value in ("Bearer", "Basic abc", "Bearer x y", "bearer\tx", "Bearer \xff"):
        response = coordinator.http.get("/v1/federations", headers=[(b"authorization", value.encode("latin-1"))])
        assert response.status_code == 401, value


def test_one_secret_may_serve_in_two_federations(coordinator: InThread) -> None:
    for name in ("one", "two"):
        coordinator.create(name=name)
        [client] = coordinator.enrol(name, "a")
        assert client.task().status_code == 204
        update = update_body({}, {"task_id": "t", "payload": {"sha256": "x"}})
        assert client.send({"task_id": "t"}, update).status_code == 404


def test_every_refusal_is_a_documented_problem(coordinator: InThread) -> None:
    schema = coordinator.http.get("/openapi.json").json()
    assert set(schema["components"]["schemas"]["Problem"]["required"]) == {"type", "title", "status", "detail"}
    for path, verbs in schema["paths"].items():
        for verb, operation in verbs.items():
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    media = response["content"]
                    assert list(media) == ["application/problem+json"], (verb, path, status)
                    assert "`" in response["description"]
    update = schema["paths"]["/v1/federations/{federation}/tasks/{task_id}/update"]["put"]["responses"]
    assert {"200", "201", "400", "401", "403", "404", "408", "409", "413", "415", "422", "503", "507"} <= set(update)
    for kind in ("`unknown-tensor`", "`missing-tensor`", "`wrong-shape`", "`wrong-dtype`", "`not-finite`"):
        assert kind in update["422"]["description"]


def test_an_answer_of_a_secure_sum_may_be_longer_than_json(coordinator: InThread, tokens: dict[str, str]) -> None:
    """A masked vector is no JSON: ``exchanges.limit`` bounds it, and here it is refused for its task only."""
    url, headers = "/v1/federations/mine/tasks/none/exchange", {"Authorization": f"Bearer {tokens['client']}"}
    body = bytes(9 << 20)
    answer = coordinator.http.put(url, content=body, headers=headers | {"Content-Digest": content_digest(body)})
    assert (answer.status_code, answer.json()["type"].rsplit("/")[-1]) == (404, "not-found"), answer.text


def test_addresses_verbs_and_bodies_that_are_not_there_are_problems(coordinator: InThread) -> None:
    http = coordinator.http
    found = [
        http.get("/nothing"),
        http.put("/v1/methods"),
        http.post("/v1/federations", content=b"{", headers=coordinator.operator | {"Content-Type": "application/json"}),
        http.post("/v1/federations", json=[1], headers=coordinator.operator),
        http.post("/v1/federations", json={"x": "y" * 9_000_000}, headers=coordinator.operator),
        http.get("/v1/federations?limit=0", headers=coordinator.operator),
        http.get("/v1/federations?limit=5&page=2", headers=coordinator.operator),
    ]
    kinds = [(one.status_code, one.json()["type"].rsplit("/")[-1]) for one in found]
    wrong, large = (422, "invalid-request"), (413, "too-large")
    assert kinds == [(404, "not-found"), (405, "method-not-allowed"), wrong, wrong, large, wrong, wrong]
    assert found[-1].json()["detail"] == "query.page: is not known here; check its spelling"
    for one in found:
        assert one.headers["content-type"] == "application/problem+json"
        assert one.json()["status"] == one.status_code


def test_answers_of_the_api_are_kept_by_nobody_and_guessed_at_by_nobody(coordinator: InThread) -> None:
    federation = coordinator.create()
    coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    prompts = f"/v1/federations/{federation}/prompts"
    metrics = f"/v1/federations/{federation}/metrics"
    for path, status in (("/v1/federations", 200), (prompts, 200), ("/v1/nothing", 404), (metrics, 200)):
        answer = coordinator.http.get(path, headers=coordinator.operator)
        assert answer.status_code == status
        assert answer.headers["cache-control"] == "no-store", path
        assert answer.headers["x-content-type-options"] == "nosniff", path
    refused = coordinator.http.get("/v1/federations")
    assert (refused.status_code, refused.headers["cache-control"]) == (401, "no-store")
    for path in ("/", "/healthz", "/openapi.json"):
        assert coordinator.http.get(path).headers["x-content-type-options"] == "nosniff", path


@pytest.mark.parametrize(
    ("options", "address"), [({}, "127.0.0.1"), ({"forwarded_allow_ips": "127.0.0.1"}, "203.0.113.9")]
)
def test_where_a_call_comes_from_is_a_proxy_s_word_only_where_asked_for(
    tmp_path: Path, options: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # the server library's own variable says nothing here
    with in_thread(tmp_path / "data", **options) as coordinator:
        coordinator.http.headers["X-Forwarded-For"] = "203.0.113.9"
        coordinator.create()
        [entry] = coordinator.get("/v1/audit-log")["entries"]
        assert entry["address"] == address


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (problems.NameTaken, "name-taken"), (problems.NoState, "no-state"),
        (problems.TooManyClassNames, "too-many-class-names"), (problems.BodyTooLarge, "too-large"),
        (problems.Ended, "federation-ended"), (problems.ObjectsAway, "store-away"),
    ],
)  # fmt: skip
def test_a_kind_is_the_class_s_name_unless_the_protocol_has_another(refusal: type[problems.Refusal], kind: str) -> None:
    assert refusal.kind == kind


def test_a_refusal_says_when_to_try_again() -> None:
    for refusal in (problems.StoreAway(), problems.ObjectsAway("away"), problems.TooManyUploads("too many")):
        assert (refusal.status, refusal.headers) == (503, {"Retry-After": "2"})


def test_the_same_application_serves_within_a_process(tmp_path: Path) -> None:
    async def federation() -> int:
        app = create_app(Settings(data_dir=tmp_path / "data"))
        transport = httpx.ASGITransport(app)
        async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://inside") as http:
            operator = bearer((tmp_path / "data" / "operator.token").read_text().strip())
            path = "/v1/federations/eyes"
            await http.post("/v1/federations", json=spec(), headers=operator)
            token = (await http.post(f"{path}/enrolment-tokens", json={"uses": 2}, headers=operator)).json()["token"]
            for name in ("a", "b"):
                await http.post(f"{path}/clients", json=enrolment(name), headers=bearer(token))
            options = {"params": {"wait": 60}, "headers": bearer(secret_of("a")), "timeout": PATIENCE}
            waiting = asyncio.create_task(http.get(f"{path}/task", **options))
            await asyncio.sleep(0.05)
            await http.post(f"{path}/start", headers=operator)
            return (await waiting).status_code

    assert asyncio.run(federation()) == 200


def test_answers_do_not_wait_for_acknowledgements(tmp_path: Path) -> None:
    with _bind(Settings(data_dir=tmp_path, port=0)) as listening:
        assert listening.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY only then"


def test_a_state_is_signed_by_the_key_that_is_shown(coordinator_with: Make) -> None:
    coordinator = coordinator_with()
    federation, _ = completed(coordinator, "a", "b", rounds=1)
    key = coordinator.http.get("/v1/signing-key").json()
    assert key["algorithm"] == "ed25519"
    signatures = set()
    for round in (0, 1):
        path = f"/v1/federations/{federation}/prompts?round={round}"
        answer = coordinator.http.get(path, headers=coordinator.operator)
        signature, state_hash = answer.headers["promptfed-signature"], answer.headers["etag"].strip('"')
        signatures.add(signature)
        assert is_signed(key["public_key"], signature, statement(federation, round, state_hash))
        for other in (
            statement("fed-0", round, state_hash),
            statement(federation, round + 1, state_hash),
            statement(federation, round, "sha256:" + "0" * 64),
        ):
            assert not is_signed(key["public_key"], signature, other)
    assert len(signatures) == 2
    coordinator.stop()
    assert coordinator_with().http.get("/v1/signing-key").json() == key, "the same after a restart"


def test_the_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    assert stat.S_IMODE((tmp_path / "signing.key").stat().st_mode) == 0o600
    assert Signer(tmp_path).public_key == signer.public_key
    said = statement("fed-1", 3, "sha256:ab")
    assert is_signed(signer.public_key, signer.sign(said), said)
    for key, signature in (("", ""), ("zz", "00"), (signer.public_key, "00"), ("00" * 32, signer.sign(said))):
        assert not is_signed(key, signature, said)
    (tmp_path / "signing.key").write_text("no key")
    with pytest.raises(CannotOpen, match="holds no Ed25519 key"):
        Signer(tmp_path)


@pytest.mark.parametrize(("role", "is_more"), [("viewer", False), ("operator", True), ("admin", True)])
def test_an_operator_is_more_than_a_viewer(role: str, is_more: bool) -> None:
    assert deps.is_operator(cast(Any, SimpleNamespace(role=role))) is is_more
