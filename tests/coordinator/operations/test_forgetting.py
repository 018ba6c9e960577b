"""A forgotten client: the federation is what it would be had the client never enrolled, and nothing of it is left."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import new_federation
from promptfed.coordinator.domain.run_state import Member
from promptfed.coordinator.operations import forgetting
from promptfed.coordinator.store.fault_points import FORGETTING_POINTS
from promptfed.coordinator.store.tables import Base, TaskRow, UpdateRow
from promptfed.shared.api.access_schemas import AuditEntry, BrokenChain, check_chain
from promptfed.shared.api.forgetting_schemas import SignedForgetting
from promptfed.shared.canonical import canonical_json
from promptfed.shared.signatures import forgetting_statement, is_signed
from promptfed.shared.spec.spec import FederationSpec
from promptfed.testing.clients import spec
from promptfed.testing.coordinator import OperatorCalls
from tests.support.coordinators import ForkedCoordinator, InThread, in_thread
from tests.support.kill_campaign import MethodClient
from tests.support.waiting import wait_for

METHODS: dict[str, dict[str, Any]] = {
    "promptfl": {"name": "promptfl", "m": 4},
    "fedpgp": {"name": "fedpgp", "m": 4},
    "plan": {"name": "plan", "m": 2},
    "pfedpg": {"name": "pfedpg", "m": 4},
    "fedtpg": {"name": "fedtpg", "m": 4},
}
GONE = "quokka"


class Play:
    """A federation whose clients join before round 1, or while the round of their number trains."""

    def __init__(self, api: OperatorCalls, name: str, method: str, joins: dict[str, int], fraction: float, **more: Any):
        part = {"min_clients": 1, "fraction": fraction, "draw": "public", **more.pop("participation", {})}
        raw = spec(name=name, method=None, rounds=4, participation=part, **more) | {"method": METHODS[method]}
        self.api, self.joins = api, joins
        self.id = api.post("/v1/federations", raw, status=201)["id"]
        self.clients: dict[str, MethodClient] = {}
        self._enrol(0)
        api.post(f"{self.id}/start")

    def _enrol(self, round: int) -> None:
        for name, at in self.joins.items():
            if at <= round and name not in self.clients:
                self.clients[name] = MethodClient(self.api.http, self.id, name)
                assert self.clients[name].enrol(self.api.token(self.id, uses=1)).status_code == 201

    def until(self, round: int | None) -> None:
        """Play until ``round`` has begun; None: to the end."""
        end = time.monotonic() + 60
        while True:
            shown = self.api.get(self.id)
            if shown["state"] == "finished" or (round is not None and shown["round"] >= round):
                return
            assert time.monotonic() < end, shown
            self._enrol(shown["round"])
            for client in self.clients.values():
                response = client.task(wait=0.02)
                if response.status_code == 200:
                    # An answer may come too late only where rounds were taken back in between.
                    assert client.answer(response.json()).status_code in (200, 201)

    def forget(self, name: str) -> Any:
        answer = self.api.post(f"{self.id}/clients/{name}/forgetting")
        del self.clients[name], self.joins[name]
        return answer

    @property
    def hashes(self) -> list[str]:
        reports = self.api.get(f"{self.id}/rounds")["rounds"]
        return [report["state_hash"] for report in reports]


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


def without(api: OperatorCalls, method: str, joins: dict[str, int], fraction: float, **more: Any) -> list[str]:
    """The hashes of the federation in which the forgotten client never enrolled."""
    joins = {name: round for name, round in joins.items() if name != GONE}
    other = Play(api, "without", method, joins, fraction, **more)
    other.until(None)
    return other.hashes


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("method", METHODS)
def test_it_is_as_if_the_client_had_never_enrolled(coordinator: InThread, method: str, fraction: float) -> None:
    joins = {"a": 0, "B": 0, "c": 0, GONE: 2, "d": 3}
    played = Play(coordinator, "played", method, dict(joins), fraction)
    played.until(4)
    done = played.forget(GONE)["report"]["done"]
    assert (done["first_round"], done["rounds"], done["restarts"]) == (3, 2, False)
    played.until(None)
    assert played.hashes == without(coordinator, method, joins, fraction)
    for round in range(5):
        states = coordinator.post(f"{played.id}/rounds/{round}/replay", {})["states"]
        assert all(state["same"] for state in states)


@pytest.mark.both_databases
@pytest.mark.parametrize(("method", "finished"), [("promptfl", True), ("pfedpg", False)])
def test_who_was_there_from_the_start_takes_it_back_to_the_start(
    coordinator: InThread, method: str, finished: bool
) -> None:
    joins = {"a": 0, "B": 0, "c": 2, GONE: 0}
    played = Play(coordinator, "played", method, dict(joins), 0.7)
    played.until(None if finished else 3)
    if not finished:
        coordinator.post(f"{played.id}/pause")
    assert coordinator.get(f"{played.id}/clients/{GONE}/forgetting")["first_round"] == 0
    report = played.forget(GONE)["report"]
    assert report["done"]["restarts"] is finished
    assert report["federation"]["state"] == ("running" if finished else "enrolling")
    if not finished:
        coordinator.post(f"{played.id}/start")
    played.until(None)
    assert played.hashes == without(coordinator, method, joins, 0.7)


def test_where_states_are_not_kept_the_whole_run_is_repeated(coordinator: InThread) -> None:
    joins = {"a": 0, "B": 0, GONE: 2}
    played = Play(coordinator, "played", "promptfl", dict(joins), 1.0, retention="last_round")
    played.until(None)
    path = f"{played.id}/clients/{GONE}/forgetting"
    wait_for("earlier states are removed", lambda: coordinator.get(path)["first_round"] == 0)
    played.forget(GONE)
    played.until(None)
    assert played.hashes == without(coordinator, "promptfl", joins, 1.0, retention="last_round")


def texts(coordinator: InThread) -> str:
    """All rows of all tables."""
    with coordinator.registry.database.read() as session:
        tables = Base.metadata.sorted_tables
        return "\n".join(str(tuple(row)) for table in tables for row in session.execute(select(table)))


def chain(coordinator: OperatorCalls) -> list[AuditEntry]:
    entries = coordinator.get("/v1/audit-log", params={"limit": 1000})["entries"]
    return [AuditEntry.model_validate(entry) for entry in entries]


@pytest.mark.both_databases
def test_nothing_of_it_is_left_and_the_certificate_says_what_was_done(coordinator: InThread, tmp_path: Path) -> None:
    played = Play(coordinator, "played", "pfedpg", {"a": 0, GONE: 0, "c": 1}, 1.0)
    played.until(3)
    id = coordinator.registry.federations[played.id].clients[GONE].id
    with coordinator.registry.database.read() as session:
        mine = select(UpdateRow.sha256).join(TaskRow, TaskRow.id == UpdateRow.task_id).where(TaskRow.client == GONE)
        digests = set(session.scalars(mine))
        updates = [coordinator.registry.blobs.read(digest) for digest in digests]
    names = (GONE, id, *digests, *(digest.partition(":")[2] for digest in digests))
    tensors = [update[-64:] for update in updates]

    def found(where: Path) -> list[str]:
        files = [(one, one.read_bytes()) for one in where.rglob("*") if one.is_file()]
        hits = [(one, wanted) for one, content in files for wanted in (*(n.encode() for n in names), *tensors)]
        return [f"{one.name}: {wanted[:20]!r}" for one, wanted in hits if wanted in one.read_bytes()]

    assert len(found(tmp_path / "data")) > 3 or not coordinator.registry.database.backend.in_folder
    before = chain(coordinator)
    assert any(name in texts(coordinator) for name in names)
    shown = played.forget(GONE)
    played.until(None)
    after = texts(coordinator)
    assert [name for name in names if name in after] == []
    assert not any(str(tensor)[2:-1] in after for tensor in tensors)
    coordinator.registry.database.erase()
    assert found(tmp_path / "data") == []
    if coordinator.registry.database.backend.in_folder:
        copy = tmp_path / "backup"
        copy.mkdir()
        with sqlite3.connect(tmp_path / "data" / "promptfed.sqlite3") as one, sqlite3.connect(copy / "db") as other:
            one.backup(other)
        assert found(copy) == []
    # The chain still verifies, and erased entries are those that named the client.
    entries = chain(coordinator)
    check_chain(entries)
    certificate = SignedForgetting.model_validate(shown)
    done = certificate.report.done
    assert {str(entry.number) for entry in entries if entry.act == "erased"} == set(done.tombstones)
    named = {str(entry.number) for entry in before if GONE in entry.model_dump_json()}
    assert named
    assert named <= set(done.tombstones)
    assert entries[certificate.report.forgotten.number - 1].hash == certificate.report.forgotten.hash
    said = forgetting_statement(canonical_json(certificate.report.model_dump(mode="json")))
    assert is_signed(coordinator.get("/v1/signing-key")["public_key"], certificate.signature, said)
    assert done.client.is_of(GONE)
    assert not done.client.is_of("a")
    # Asked again, it answers with the same certificate.
    assert coordinator.post(f"{played.id}/clients/{GONE}/forgetting")["report"]["done"] == shown["report"]["done"]
    assert coordinator.post(f"{played.id}/clients/wombat/forgetting", status=404)["type"].endswith("not-found")


def test_an_entry_that_nothing_accounts_for_breaks_the_chain(coordinator: InThread) -> None:
    played = Play(coordinator, "played", "promptfl", {"a": 0, GONE: 0}, 1.0)
    played.forget(GONE)
    entries = chain(coordinator)
    check_chain(entries)
    other = next(entry for entry in entries if entry.act == "federation-created")
    forged = other.model_copy(update={"act": "erased", "detail": {}})
    with pytest.raises(BrokenChain, match=f"entry {other.number} was erased"):
        check_chain([forged if entry is other else entry for entry in entries])
    buried = next(entry for entry in entries if entry.act == "erased")
    with pytest.raises(BrokenChain):
        check_chain([entry.model_copy(update={"hash": "0" * 64}) if entry is buried else entry for entry in entries])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"secure_aggregation": {"minimum": 3}}, "one sum for each round"),
        ({"privacy": {"level": "client", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}}, "a second release"),
    ],
)
def test_where_rounds_cannot_be_repeated_it_is_refused(changes: dict[str, Any], why: str) -> None:
    asked = FederationSpec.model_validate(spec(**changes))
    federation = new_federation("fed-1", asked)
    joined = replace(federation, run=replace(federation.run, members={GONE: Member("trainer", joined=True)}))
    with pytest.raises(forgetting.CannotForget, match=why):
        forgetting._way(Session(), joined, GONE)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("fault", [f"{name}:1" for name in FORGETTING_POINTS])
def test_a_kill_leaves_what_was_or_what_is_to_be(tmp_path: Path, fault: str, first: int) -> None:
    joins = {"a": 0, "c": 0, GONE: 2 if first else 0}
    process = ForkedCoordinator(tmp_path / "data", fault=fault)
    try:
        played = Play(process, "played", "promptfl", dict(joins), 1.0)
        played.until(4)
        with pytest.raises(httpx.HTTPError):
            played.forget(GONE)
        assert process.wait() == -9
    finally:
        process.kill()
    with in_thread(tmp_path / "data") as coordinator:
        names = [one["name"] for one in coordinator.get(f"{played.id}/clients")["clients"]]
        assert (GONE in names) is fault.startswith("forget-before")
        played.api = coordinator
        for client in played.clients.values():
            client.http = coordinator.http
        report = played.forget(GONE)["report"]
        assert report["done"]["first_round"] == first
        assert GONE not in texts(coordinator)
        played.until(None)
        assert played.hashes == without(coordinator, "promptfl", joins, 1.0)
        check_chain(chain(coordinator))
