"""Operators by name, and the log of what they and others did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from promptfed.shared.api.api_schemas import AuditEntry, BrokenChain, check_chain
from promptfed.testing.clients import bearer, spec
from tests.support.coordinators import InThread


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


def named(coordinator: InThread, name: str, role: str) -> dict[str, str]:
    minted = coordinator.post("/v1/operators", {"name": name, "role": role}, status=201)
    return bearer(minted["token"])


def log(coordinator: InThread) -> list[AuditEntry]:
    return [
        AuditEntry.model_validate(one) for one in coordinator.get("/v1/audit-log", params={"limit": 1000})["entries"]
    ]


@pytest.mark.both_databases
def test_operators_have_roles_an_end_and_a_list(coordinator_with: Callable[..., InThread]) -> None:
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
    assert sorted((one["name"], one["role"]) for one in listed) == [
        ("anna", "admin"),
        ("anna", "operator"),
        ("otto", "viewer"),
    ]
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

    monkeypatch.setattr("promptfed.coordinator.operations.tokens.token_of", breaks)
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
    for tampered in (
        [entries[0], other, *entries[2:]],
        [entries[0], rehashed, *entries[2:]],
        [entries[0], *entries[2:]],
        [entries[1], entries[0], *entries[2:]],
        entries[1:],
    ):
        with pytest.raises(BrokenChain):
            check_chain(tampered)
    with coordinator.registry.database.write() as session:
        session.execute(text("UPDATE audit_log SET address = '10.0.0.1' WHERE number = 3"))
    with pytest.raises(BrokenChain, match="entry 3 was changed"):
        check_chain(log(coordinator))
