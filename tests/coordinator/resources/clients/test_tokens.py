"""Enrolment tokens let in whom they were minted for, and nobody else."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.domain import clock
from promptfed.coordinator.resources.clients import tokens
from promptfed.shared.api.api_schemas import AuditEntry, BrokenChain, TokenRequest, check_chain
from promptfed.shared.service.invitation import decode
from promptfed.testing.clients import bearer, secret_of, spec
from tests.support.coordinators import InThread, Make
from tests.support.open_phases import enrolled, told


def test_a_token_lets_in_one_client_unless_it_says_more(coordinator: InThread) -> None:
    federation = coordinator.create()
    minted = coordinator.post(f"{federation}/enrolment-tokens", status=201)
    assert minted["uses"] == 1
    token = minted["token"]
    assert coordinator.client(federation, "a").enrol(token).status_code == 201
    assert told(coordinator.client(federation, "b").enrol(token)) == (409, "token-used-up")
    assert coordinator.client(federation, "a").enrol(token).status_code == 200, "its answer may have been lost"
    info = coordinator.http.get(f"/v1/federations/{federation}/enrolment", headers=bearer(token))
    assert info.status_code == 200, "a client that is started again asks with it"
    three = coordinator.token(federation, uses=3)
    answers = [coordinator.client(federation, name).enrol(three).status_code for name in "bcde"]
    assert answers == [201, 201, 201, 409]


@pytest.mark.parametrize("hours", [0.5, 24 * 7])
def test_a_token_ends_after_the_hours_that_it_was_asked_for(
    hours: float, coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "utc", lambda: datetime(2030, 1, 1, tzinfo=UTC))
    path = f"{coordinator.create()}/enrolment-tokens"
    asked = [coordinator.post(path, {"hours": hours}, status=201)["expires_at"]]
    named = {"name": "a", "role": "viewer", "hours": hours}
    asked.append(coordinator.post("/v1/operators", named, status=201)["expires_at"])
    assert {datetime.fromisoformat(one) for one in asked} == {datetime(2030, 1, 1, tzinfo=UTC) + timedelta(hours=hours)}
    default = coordinator.post(path, status=201)["expires_at"]
    own = timedelta(hours=coordinator.settings.token_hours)
    assert datetime.fromisoformat(default) == datetime(2030, 1, 1, tzinfo=UTC) + own


def test_a_token_for_one_role_lets_in_no_other(coordinator: InThread) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation, uses=2, role="evaluator")
    assert told(coordinator.client(federation, "a").enrol(token)) == (409, "other-token")
    assert coordinator.client(federation, "a").enrol(token, role="evaluator").status_code == 201


def test_a_withdrawn_client_does_not_come_back_by_its_token(coordinator: InThread) -> None:
    federation = coordinator.create()
    token, other = coordinator.token(federation, uses=5), coordinator.token(federation, uses=5)
    for name in ("a", "b"):
        assert coordinator.client(federation, name).enrol(token).status_code == 201
    for _ in range(2):
        coordinator.delete(f"{federation}/clients/a")
    assert told(coordinator.client(federation, "a").enrol(other)) == (403, "withdrawn")
    again = coordinator.client(federation, "as-somebody-else").enrol(token)
    assert told(again) == (409, "token-used-up")
    assert "withdrawn" in again.json()["detail"]
    assert coordinator.client(federation, "b").enrol(token).status_code == 200, "who shared it stays"
    assert coordinator.client(federation, "c").enrol(other).status_code == 201
    coordinator.post(f"{federation}/clients/a/reset")
    mine = coordinator.token(federation, client="a")
    coordinator.delete(f"{federation}/clients/b")
    assert coordinator.client(federation, "a").enrol(mine).status_code == 201
    assert coordinator.get(federation)["clients"] == {"trainers": 2, "evaluators": 0, "withdrawn": 1}


def test_a_token_for_a_reset_name_falls_with_the_client(coordinator: InThread) -> None:
    federation = coordinator.create()
    coordinator.enrol(federation, "a")
    coordinator.post(f"{federation}/clients/a/reset")
    mine = coordinator.token(federation, client="a")
    coordinator.delete(f"{federation}/clients/a")
    assert told(coordinator.client(federation, "a").enrol(mine, secret="e" * 64)) == (409, "token-used-up")


def test_a_reset_name_is_for_the_token_that_was_minted_for_it(coordinator: InThread) -> None:
    federation, [a] = enrolled(coordinator, "a")
    path = f"{federation}/enrolment-tokens"
    assert "reset it first" in coordinator.post(path, {"client": "a"}, status=409)["detail"]
    coordinator.post(path, {"client": "nobody"}, status=404)
    for wrong in ({"client": "a", "uses": 2}, {"hours": -1}):
        coordinator.post(path, wrong, status=422)
    coordinator.post(f"{federation}/clients/a/reset")
    stranger = a.enrol(coordinator.token(federation), secret="e" * 64)
    assert told(stranger) == (409, "name-taken")
    mine = coordinator.token(federation, client="a")
    assert told(coordinator.client(federation, "b").enrol(mine)) == (409, "other-token")
    assert a.enrol(mine, secret="f" * 64).status_code == 201


def test_tokens_are_listed_and_taken_back(coordinator: InThread) -> None:
    federation = coordinator.create()
    path = f"{federation}/enrolment-tokens"
    ward = coordinator.post(path, {"name": "ward-3", "role": "trainer", "uses": 2}, status=201)
    spare = coordinator.post(path, status=201)
    coordinator.post(path, {"name": "ward-3"}, status=409)
    assert coordinator.client(federation, "a").enrol(ward["token"]).status_code == 201
    listed = coordinator.get(path)
    assert listed["next"] is None
    views = {view["name"]: view for view in listed["tokens"]}
    assert set(views) == {"ward-3", spare["id"]}
    shown = {key: views["ward-3"][key] for key in ("role", "uses", "used", "closed", "client", "clients")}
    assert shown == {"role": "trainer", "uses": 2, "used": 1, "closed": False, "client": None, "clients": ["a"]}
    assert ward["token"] not in str(listed)
    first = coordinator.get(path, params={"limit": 1})
    rest = coordinator.get(path, params={"limit": 1, "after": first["next"]})
    assert first["tokens"] + rest["tokens"] == listed["tokens"]
    coordinator.delete(f"{path}/ward-3")
    coordinator.delete(f"{path}/ward-3", status=404)
    assert told(coordinator.client(federation, "b").enrol(ward["token"])) == (401, "unauthorized")
    assert coordinator.client(federation, "a").task().status_code == 204, "who came by it stays"
    assert [view["id"] for view in coordinator.get(path)["tokens"]] == [spare["id"]]


def test_a_restart_knows_who_is_in(coordinator_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = coordinator_with()
    federation = first.create(class_names=None)
    token, closed = first.token(federation, uses=2), first.token(federation, uses=2)
    first.client(federation, "a").enrol(token)
    first.client(federation, "gone").enrol(closed)
    first.delete(f"{federation}/clients/gone")
    named = first.registry.get(federation).named
    first.stop()
    again = coordinator_with()
    assert again.registry.get(federation).named == named
    assert again.client(federation, "b").enrol(token).status_code == 201
    assert told(again.client(federation, "c").enrol(token)) == (409, "token-used-up")
    assert told(again.client(federation, "c").enrol(closed)) == (409, "token-used-up")


def test_nobody_who_enrols_keeps_others_from_starting(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody comes while each initial state is made: it was made again for as long as anybody came."""
    federation = coordinator.create()
    coordinator.enrol(federation, "a", "b")
    token, made, refused = coordinator.token(federation), [0], []
    real = global_state.initial_state

    def made_while_somebody_comes(*arguments: object) -> object:
        made[0] += 1
        assert made[0] < 20, "the federation does not start"
        refused.append(coordinator.client(federation, f"late-{made[0]}").enrol(token))
        return real(*arguments)

    monkeypatch.setattr(global_state, "initial_state", made_while_somebody_comes)
    assert coordinator.post(f"{federation}/start")["state"] == "running"
    assert (made[0], [told(answer) for answer in refused]) == (1, [(503, "starting")])
    assert refused[0].headers["retry-after"] == "1"
    late = coordinator.client(federation, "late-1").enrol(token)
    assert late.status_code == 201, "once the rounds have begun, it comes in as any newcomer"
    coordinator.delete(f"{federation}/clients/late-1")


def test_a_secret_of_before_is_not_a_way_in(coordinator: InThread) -> None:
    federation = coordinator.create()
    coordinator.enrol(federation, "a")
    coordinator.delete(f"{federation}/clients/a")
    other = coordinator.client(federation, "b").enrol(coordinator.token(federation), secret=secret_of("a"))
    assert told(other) == (409, "secret-taken")


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_that_is_not_declared_as_json_is_told_so(coordinator: InThread, kind: str | None) -> None:
    federation = coordinator.create()
    headers = coordinator.operator | ({} if kind is None else {"Content-Type": kind})
    url = f"/v1/federations/{federation}/enrolment-tokens"
    response = coordinator.http.post(url, content=b'{"uses": 2}', headers=headers)
    assert response.status_code == 422
    assert "Content-Type: application/json" in response.json()["detail"]
    # A JSON string is declared well, and wrong otherwise.
    response = coordinator.http.post(url, json="uses", headers=coordinator.operator)
    assert response.status_code == 422
    assert "Content-Type" not in response.json()["detail"]


# Operators by name, and the log of what they and others did.


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


def named(coordinator: InThread, name: str, role: str) -> dict[str, str]:
    minted = coordinator.post("/v1/operators", {"name": name, "role": role}, status=201)
    return bearer(minted["token"])


def log(coordinator: InThread) -> list[AuditEntry]:
    entries = coordinator.get("/v1/audit-log", params={"limit": 1000})["entries"]
    return [AuditEntry.model_validate(one) for one in entries]


@pytest.mark.both_databases
def test_operators_have_roles_an_end_and_a_list(coordinator_with: Make) -> None:
    coordinator = coordinator_with()
    anna, otto = named(coordinator, "anna", "operator"), named(coordinator, "otto", "viewer")
    again = coordinator.post("/v1/operators", {"name": "anna", "role": "admin", "hours": 2}, status=201)
    http = coordinator.http
    assert http.post("/v1/federations", json=spec(), headers=otto).status_code == 403
    assert http.post("/v1/federations", json=spec(), headers=anna).status_code == 201
    assert http.get("/v1/federations/eyes", headers=otto).status_code == 200
    refused = http.get("/v1/operators", headers=anna)
    assert (refused.status_code, "takes the role admin; anna has the role operator" in refused.text) == (403, True)
    listed = http.get("/v1/operators", headers=bearer(again["token"])).json()["operators"]
    names = sorted((one["name"], one["role"]) for one in listed)
    assert names == [("anna", "admin"), ("anna", "operator"), ("otto", "viewer")]
    assert again["token"] not in str(listed)
    coordinator.stop()
    coordinator = coordinator_with()
    assert coordinator.http.get("/v1/federations", headers=anna).status_code == 200, "known after a restart"
    coordinator.delete(f"/v1/operators/{again['id']}")
    assert coordinator.http.get("/v1/operators", headers=bearer(again["token"])).status_code == 401
    coordinator.delete("/v1/operators/anna")
    coordinator.delete("/v1/operators/anna", status=404)
    assert coordinator.http.get("/v1/federations", headers=anna).status_code == 401
    assert coordinator.http.get("/v1/federations", headers=otto).status_code == 200
    for wrong in ({"name": "a b", "role": "admin"}, {"name": "a", "role": "root"}, {"name": "a"}):
        coordinator.post("/v1/operators", wrong, status=422)


@pytest.mark.both_databases
def test_each_act_is_written_down_with_who_did_it_from_where(coordinator: InThread) -> None:
    anna = named(coordinator, "anna", "operator")
    federation = coordinator.http.post("/v1/federations", json=spec(), headers=anna).json()["id"]
    path = f"/v1/federations/{federation}"
    token = coordinator.post(f"{federation}/enrolment-tokens", {"name": "wards", "uses": 3}, status=201)["token"]
    for name in ("a", "b", "c"):
        assert coordinator.client(federation, name).enrol(token).status_code == 201
    assert coordinator.client(federation, "a").enrol(token).status_code == 200, "nothing new: no entry"
    coordinator.post(f"{federation}/enrolment-tokens", {"client": "a"}, status=409)
    coordinator.http.post(f"{path}/start", headers=anna)
    coordinator.post(f"{federation}/start", status=409)
    coordinator.delete(f"{federation}/clients/c?discard=true")
    coordinator.delete(f"{federation}/clients/c/updates")
    coordinator.post(f"{federation}/clients/c/reset")
    coordinator.delete(f"{federation}/enrolment-tokens/wards")
    coordinator.post(f"{federation}/cancel")
    coordinator.http.delete(path, headers=anna)
    entries = log(coordinator)
    assert check_chain(entries) == (len(entries), entries[-1].hash)
    acts = [(one.actor, one.role, one.act) for one in entries]
    assert acts == [
        ("operator.token", "admin", "operator-named"),
        ("anna", "operator", "federation-created"),
        ("operator.token", "admin", "token-minted"),
        *[("wards", "enrolment", "client-enrolled")] * 3,
        ("anna", "operator", "federation-start"),
        ("operator.token", "admin", "client-withdrawn"),
        ("operator.token", "admin", "updates-deleted"),
        ("operator.token", "admin", "client-reset"),
        ("operator.token", "admin", "token-revoked"),
        ("operator.token", "admin", "federation-cancel"),
        ("anna", "operator", "federation-deleted"),
    ]
    assert {one.address for one in entries} == {"127.0.0.1"}
    assert {one.federation_name for one in entries[1:]} == {"eyes"}, "kept although it is deleted"
    assert [one.detail["client"] for one in entries[3:6]] == ["a", "b", "c"]
    assert token not in str(entries)


def test_what_the_coordinator_does_by_itself_is_its_own(coordinator: InThread) -> None:
    federation = coordinator.create(start="when_ready")
    coordinator.enrol(federation, "a", "b")
    coordinator.until(federation, state="running")
    started = [one for one in log(coordinator) if one.act == "federation-start"]
    assert [(one.actor, one.role, one.address) for one in started] == [("the coordinator", "", "")]


def test_an_act_that_fails_leaves_no_entry(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = coordinator.create()
    before = log(coordinator)

    def breaks(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("promptfed.coordinator.resources.clients.tokens.token_of", breaks)
    coordinator.post(f"{federation}/enrolment-tokens", status=500)
    assert log(coordinator) == before


def changed(entry: AuditEntry, **fields: Any) -> AuditEntry:
    return entry.model_copy(update=fields)


def test_a_log_that_was_tampered_with_is_found_out(coordinator: InThread) -> None:
    for name in ("a", "b", "c", "d"):
        named(coordinator, name, "viewer")
    entries = log(coordinator)
    assert check_chain(entries)[0] == 4
    other = changed(entries[1], actor="somebody else")
    rehashed = changed(other, hash=other.computed_hash())
    first, second, *rest = entries
    without = [first, *rest], [second, first, *rest], [second, *rest]
    for tampered in ([first, other, *rest], [first, rehashed, *rest], *without):
        with pytest.raises(BrokenChain):
            check_chain(tampered)
    with coordinator.registry.database.write() as session:
        session.execute(text("UPDATE audit_log SET address = '10.0.0.1' WHERE number = 3"))
    with pytest.raises(BrokenChain, match="entry 3 was changed"):
        check_chain(log(coordinator))


@pytest.mark.parametrize("size", [1, 2])
def test_pages_joined_are_the_whole_of_every_list(coordinator: InThread, size: int) -> None:
    federation = coordinator.create(name="first")
    coordinator.create(name="second")
    coordinator.create(name="third")
    coordinator.enrol(federation, "a", "b", "c")
    for name in ("anna", "otto", "vera"):
        named(coordinator, name, "viewer")
    own = f"/v1/federations/{federation}"
    lists = {
        "/v1/federations": ("federations", 3), f"{own}/clients": ("clients", 3),
        f"{own}/enrolment-tokens": ("tokens", 1), "/v1/operators": ("operators", 3),
        "/v1/audit-log": ("entries", 10),
    }  # fmt: skip
    for path, (key, least) in lists.items():
        whole = coordinator.get(path, params={"limit": 1000})
        joined, after, pages = [], {}, 0
        while after is not None:
            page = coordinator.get(path, params={"limit": size} | after)
            joined += page[key]
            assert 0 < len(page[key]) <= size, path
            assert len(joined) <= len(whole[key]), path
            after, pages = ({"after": page["next"]} if page["next"] is not None else None), pages + 1
        assert joined == whole[key], path
        assert whole["next"] is None
        assert (len(joined), pages) == (len(whole[key]), -(-len(whole[key]) // size)), path
        assert len(joined) >= least, path


def test_a_stream_ends_once_its_operator_is_revoked(coordinator: InThread) -> None:
    federation, otto = coordinator.create(), named(coordinator, "otto", "viewer")
    path = f"/v1/federations/{federation}/events"
    with coordinator.http.stream("GET", path, headers=otto) as events:
        lines = events.iter_lines()
        assert next(lines).startswith("event:")
        coordinator.delete("/v1/operators/otto")
        until = time.monotonic() + 20
        for _ in lines:
            assert time.monotonic() < until, "at once: not when something happens, nor at the next look after a minute"
    assert coordinator.http.get(f"/v1/federations/{federation}", headers=otto).status_code == 401


@pytest.mark.parametrize(
    ("asked", "address", "client", "authority"),
    [
        ({"name": "ward"}, "https://c", "ward", "ab" * 32),
        ({"name": "ward"}, "http://c", "ward", None),
        ({"name": "ward", "client": "a"}, "https://c", "a", "ab" * 32),
        ({"name": "ward", "uses": 2}, "https://c", None, "ab" * 32),
        ({}, "https://c", None, "ab" * 32),
    ],
)
def test_an_invitation_names_whom_it_is_for(
    asked: dict[str, Any], address: str, client: str | None, authority: str | None
) -> None:
    request = TokenRequest.model_validate({"address": address, "role": "trainer"} | asked)
    minted: Any = SimpleNamespace(token="secret", expires_at=datetime(2030, 1, 1, tzinfo=UTC))
    federation: Any = SimpleNamespace(name="eyes")
    told = decode(tokens._invitation(federation, request, minted, "ab" * 32))
    assert (told.coordinator, told.federation, told.token, told.role) == (address, "eyes", "secret", "trainer")
    assert (told.client, told.authority, told.expires_at.year) == (client, authority, 2030)


@pytest.mark.parametrize(
    ("at", "client", "told"),
    [
        ("2030-01-01T00:00:00.000Z", "b", True), ("2030-01-01T00:00:01.000Z", "b", True),
        ("2029-12-31T23:59:59.999Z", "b", False), ("2030-01-01T00:00:01.000Z", "a", False), (None, "b", False),
    ],
)  # fmt: skip
def test_a_refusal_is_told_of_a_token_that_was_there_while_its_client_is_not(
    at: str | None, client: str, told: bool
) -> None:
    made = "2030-01-01T00:00:00.000Z"
    row: Any = SimpleNamespace(
        id="tok-1", name="ward", role=None, client=None, uses=2, used=1, closed=False, created_at=made, expires_at=made,
        expired_at=None,
    )  # fmt: skip
    refused = None if at is None else {"client": client, "type": "no-samples", "detail": "x", "at": at}
    federation: Any = SimpleNamespace(clients={"a": None})
    view = tokens._view(row, ["a"], refused, federation)
    assert (view.refused is not None, view.clients, view.used) == (told, ["a"], 1)
