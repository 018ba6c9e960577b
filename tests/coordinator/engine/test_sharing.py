"""Several coordinators on one database: who carries out what, and that nobody else writes of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from sqlalchemy import select, text, update

from promptfed.coordinator.domain import clock
from promptfed.coordinator.engine import recovery, retention, scheduler, sharing
from promptfed.coordinator.problems import FederationMoving
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store import blobs, bucket, database, leases
from promptfed.coordinator.store.database import CannotOpen
from promptfed.coordinator.store.opening import open_store
from promptfed.coordinator.store.tables import ClientRow, CoordinatorRow, LeaseRow
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.shared.service.net import TOLD
from promptfed.testing.clients import ScriptedClient, bearer, drive, enrolment
from tests.support.coordinators import InThread, Make
from tests.support.kill_campaign import CASES, play_case
from tests.support.object_store import ObjectStoreServer
from tests.support.open_phases import answer_all, completed, enrolled, kind, launched
from tests.support.postgres import PostgresServer
from tests.support.relay import Line
from tests.support.resending import ResendingApi
from tests.support.several import OPERATOR, TOKEN, AnyOf, own_options, shared_options, url_of
from tests.support.waiting import start_and_join, wait_for
from tests.support.whole_federation import run

pytestmark = pytest.mark.slow

Start = Make


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "SMALL_BYTES", -1)


@pytest.fixture
def start(tmp_path: Path, postgres: PostgresServer, object_store: str) -> Iterator[Start]:
    """Starts one coordinator more on the same database and objects."""
    options = shared_options(tmp_path / "shared", postgres.schema(), object_store)
    started: list[InThread] = []

    def one_more(**own: Any) -> InThread:
        server = InThread(tmp_path / f"data-{len(started)}", **options, **own_options(), **own)
        server.operator = OPERATOR
        started.append(server)
        return server

    yield one_more
    for server in started:
        server.stop()


def holder(coordinator: InThread, id: str) -> tuple[str | None, int]:
    with coordinator.registry.database.read() as session:
        row = session.get_one(LeaseRow, id)
        return row.holder, row.epoch


def sharing_is_over(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as if it were paused: what it has in memory stays as it is, and it says no more that it is there."""
    monkeypatch.setattr(coordinator.registry.leases, "renew", lambda: nullcontext(leases.LeaseLook([], [])))
    with coordinator.registry.database.write() as session:
        long_ago = update(CoordinatorRow).where(CoordinatorRow.id == coordinator.registry.leases.id)
        session.execute(long_ago.values(seen=0.0))


def test_a_request_is_sent_on_to_the_holder_with_its_token(start: Start) -> None:
    one, two = start(), start()
    id = one.create(name="eyes")
    answer = two.http.get("/v1/federations/eyes/rounds?limit=7", headers=OPERATOR)
    assert answer.status_code == 307
    assert kind(answer) == "held-elsewhere"
    assert answer.headers["location"] == f"{one.url}/v1/federations/eyes/rounds?limit=7"
    assert two.http.get(f"/v1/federations/{id}").status_code == 401, "who has no token is told nothing"
    assert two.http.get("/v1/federations/nobody-s", headers=OPERATOR).status_code == 404
    assert [found["name"] for found in two.get("/v1/federations")["federations"]] == ["eyes"]
    token = one.token(id)
    body = enrolment("a")
    sent_on = two.http.post(f"/v1/federations/{id}/clients", json=body, headers={"Authorization": f"Bearer {token}"})
    assert sent_on.status_code == 307, "the calls of a round too"
    with Coordinator(two.url, TOKEN) as api:
        assert api.send(operations.get_federation("eyes")).view.id == id
    assert two.http.get("/readyz").status_code == 200
    problem = two.http.post("/v1/federations", json=one.get(id)["spec"] | {"name": "eyes"}, headers=OPERATOR)
    assert (problem.status_code, kind(problem)) == (409, "name-taken")


def test_callers_with_a_token_are_told_all_addresses(start: Start) -> None:
    one, two = start(), start()
    one.registry.leases.look()
    listed = one.http.get("/v1/federations", headers=OPERATOR)
    assert set(listed.headers[TOLD].split(", ")) == {one.url, two.url}
    federation = one.create(name="eyes")
    token = bearer(one.token(federation))
    assert TOLD in one.http.get("/v1/federations/eyes/enrolment", headers=token).headers
    [client] = one.enrol(federation, "a")
    assert TOLD in client.task().headers, "the calls of a round too"
    for headers in ({}, bearer("0" * 64)):
        assert TOLD not in one.http.get("/v1/federations", headers=headers).headers
    sharing_ended = update(CoordinatorRow).where(CoordinatorRow.url == one.url).values(seen=0.0)
    with two.registry.database.write() as session:
        session.execute(sharing_ended)
    two.registry.leases.look()
    assert set(two.registry.leases.addresses) == {one.url, two.url}, "it may come back"


def test_a_page_may_ask_the_others_and_is_told_where_a_federation_is(start: Start) -> None:
    one, two = start(), start()
    one.create(name="eyes")
    two.registry.leases.look()
    page = OPERATOR | {"Origin": one.url, "Promptfed-Page": "1"}
    answer = two.http.get("/v1/federations/eyes", headers=page)
    assert (answer.status_code, kind(answer), answer.json()["coordinator"]) == (421, "misdirected", one.url)
    assert answer.headers["access-control-allow-origin"] == one.url
    asked = {"Origin": one.url, "Access-Control-Request-Method": "GET"}
    allowed = httpx.request("OPTIONS", f"{two.url}/v1/federations/eyes", headers=asked)
    assert allowed.status_code == 204
    assert "Authorization" in allowed.headers["access-control-allow-headers"]
    assert two.http.get("/readyz", headers={"Origin": one.url}).headers["access-control-allow-origin"] == one.url
    for origin in ("https://elsewhere.example", "null", one.url + ".example"):
        refused = two.http.get("/v1/federations", headers=OPERATOR | {"Origin": origin})
        assert "access-control-allow-origin" not in refused.headers
    policy = two.http.get("/").headers["content-security-policy"]
    assert one.url in policy.partition("connect-src ")[2].partition(";")[0].split()


def test_what_one_has_just_created_the_others_know(start: Start) -> None:
    one, two = start(), start()
    for number in range(20):
        assert two.http.get("/v1/federations/nobody-s", headers=OPERATOR).status_code == 404
        id = one.create(name=f"eyes-{number}")
        assert two.http.get(f"/v1/federations/{id}", headers=OPERATOR).status_code == 307


def test_an_idempotency_key_is_known_by_all(start: Start) -> None:
    one, two = start(), start()
    spec = {"name": "eyes", "method": {"name": "promptfl", "m": 4}, "rounds": 2, "participation": {"min_clients": 2}}
    headers = OPERATOR | {"Idempotency-Key": "once"}
    first = one.http.post("/v1/federations", json=spec, headers=headers)
    assert first.status_code == 201
    again = two.http.post("/v1/federations", json=spec, headers=headers)
    assert again.json()["id"] == first.json()["id"]


def test_what_one_lets_go_of_the_other_takes_up_where_it_stood(start: Start) -> None:
    one, two = start(), start()
    api = ResendingApi(AnyOf([one.url, two.url]), OPERATOR)
    expected = run(api, "promptfl", 3)
    id, clients = launched(api, "a", "b", name="eyes")
    tasks = api.training(clients)
    assert clients[0].answer(tasks[0]).status_code == 201
    held_by = next(server for server in (one, two) if id in server.registry.federations)
    other = two if held_by is one else one
    before = holder(other, id)
    held_by.stop()
    wait_for("the takeover", lambda: id in other.registry.leases.held)
    assert holder(other, id) == (other.registry.leases.id, before[1] + 1)
    assert clients[0].answer(tasks[0]).status_code == 200, "it has it already"
    assert clients[1].answer(tasks[1]).status_code == 201
    drive(clients)
    assert api.get(id)["state"] == "finished"
    assert expected["state"] == "finished"


def test_the_run_is_the_one_of_a_coordinator_alone(start: Start, coordinator: InThread) -> None:
    servers = [start(), start(), start()]
    api = ResendingApi(AnyOf([server.url for server in servers]), OPERATOR)
    case = replace(CASES["pfedmoap"], rounds=4)
    assert play_case(api, case) == play_case(coordinator, case)
    assert api.http.moved > 0


def test_who_was_paused_commits_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start()
    id, clients = launched(one, "a", "b", name="eyes")
    tasks = one.training(clients)
    two = start()
    sharing_is_over(one, monkeypatch)
    wait_for("the takeover", lambda: id in two.registry.leases.held)
    assert id in one.registry.federations, "it knows nothing of it yet"
    monkeypatch.setattr(type(one.registry.leases), "stale", False)
    answer = clients[0].answer(tasks[0])
    assert (answer.status_code, kind(answer)) == (503, "federation-moving")
    with pytest.raises(FederationMoving), one.registry.change(id) as change:
        change.emit("never")
    with pytest.raises(FederationMoving):
        retention.delete_federation(one.registry, id)
    with pytest.raises(FederationMoving), one.registry.write(id):
        pass
    one.registry.last_seen.seen(clients[0].name)
    one.registry.last_seen.flush()
    with two.registry.database.read() as session:
        assert session.scalars(select(ClientRow.last_seen).where(ClientRow.id == clients[0].name)).all() == []
        stored = recovery.load_one(session, id, 0.0)
    assert set(stored.tasks) == {"a", "b"}, "nobody's task is settled"
    two_s = [ScriptedClient(two.http, id, client.name, client.accuracy, client.sent) for client in clients]
    assert two_s[0].answer(tasks[0]).status_code == 201, "the same bytes, at the one that carries it out"
    assert two_s[1].answer(tasks[1]).status_code == 201
    drive(two_s)


def test_who_has_not_said_that_it_is_there_answers_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start()
    id = one.create(name="eyes")
    monkeypatch.setattr(leases, "LEASE_SECONDS", -1.0)
    answer = one.http.get(f"/v1/federations/{id}", headers=OPERATOR)
    assert (answer.status_code, kind(answer)) == (503, "store-away")
    assert one.http.get("/readyz").status_code == 503
    monkeypatch.undo()
    wait_for("the lease", lambda: one.http.get(f"/v1/federations/{id}", headers=OPERATOR).status_code == 200)


@pytest.mark.parametrize("server_ends_it", [True, False])
def test_a_holder_that_stopped_in_a_transaction_is_hung_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, server_ends_it: bool
) -> None:
    """The server's own limit on idle transactions does not end statements that were sent together."""
    if not server_ends_it:
        monkeypatch.setattr(database, "OF_SEVERAL", ())
    one = start()
    id = one.create(name="eyes")
    two = start()
    entered, leave = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def stop_in_the_middle() -> None:
        try:
            with one.registry.change(id) as change:
                change.emit("never")
                entered.set()
                leave.wait(300)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=stop_in_the_middle)
    thread.start()
    assert entered.wait(300)
    monkeypatch.setattr(one.registry.leases, "renew", lambda: nullcontext(leases.LeaseLook([], [])))
    try:
        wait_for("the takeover", lambda: id in two.registry.leases.held)
    finally:
        leave.set()
        thread.join()
    assert len(failed) == 1, "what it had begun is not committed"
    assert "could not be taken up" not in caplog.text
    with two.registry.database.read() as session:
        assert session.execute(text("SELECT count(*) FROM events WHERE kind = 'never'")).scalar() == 0


def test_who_wakes_up_answers_nothing_before_it_has_looked(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start()
    id = one.create(name="eyes")
    two = start()
    kept = one.registry.leases
    real, answers = kept.look, []

    def look() -> leases.LeaseLook:
        answers.append(one.http.get(f"/v1/federations/{id}", headers=OPERATOR).status_code)
        return real()

    sharing_is_over(one, monkeypatch)
    wait_for("the takeover", lambda: id in two.registry.leases.held)
    monkeypatch.setattr(kept, "_renewed", float("-inf"))
    monkeypatch.setattr(kept, "look", look)
    monkeypatch.delattr(kept, "renew")
    wait_for("a look", lambda: id not in one.registry.federations)
    assert answers[0] == 503, "it has said again that it is there, but does not know yet what it has lost"
    answer = one.http.get(f"/v1/federations/{id}", headers=OPERATOR)
    assert answer.status_code == 307


def test_what_a_dead_holder_had_is_read_when_it_is_needed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start()
    ids = [one.create(name=f"eyes-{number}") for number in range(12)]
    running = set(ids[4:8])
    for id in running:
        one.enrol(id, "a", "b")
        one.start(id)
    others = [start(), start()]
    sharing_is_over(one, monkeypatch)
    kept = [other.registry.leases.held for other in others]
    wait_for("the takeover", lambda: sum(map(len, kept)) == 12)
    assert not set(kept[0]) & set(kept[1])
    for other, held in zip(others, kept, strict=True):
        wait_for("those", lambda other=other, held=held: running & set(held) <= set(other.registry.federations))
        assert set(other.registry.federations) <= running, "nobody has asked for the idle ones"
        for idle in [id for id in held if id not in running][:1]:
            assert other.get(idle)["state"] == "enrolling"
            assert idle in other.registry.federations
    assert [found["id"] for found in others[0].get("/v1/federations")["federations"]] == ids


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Object stores are lost in a moment."""
    monkeypatch.setattr(bucket, "PROBE", timedelta(seconds=0.5))
    for name, seconds in {"LOOK": 0.2, "AWAY": 1.5}.items():
        monkeypatch.setattr(sharing, f"{name}_SECONDS", seconds)


def through(line: Line, start: Start, monkeypatch: pytest.MonkeyPatch) -> InThread:
    """A coordinator whose way to the object store is ``line``."""
    with monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", line.url)
        return start()


@pytest.mark.usefixtures("quick_watch")
def test_a_holder_without_its_object_store_hands_over(
    start: Start, object_server: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Line(object_server.endpoint) as line:
        one = through(line, start, monkeypatch)
        ids = [one.create(name=f"eyes-{number}") for number in range(4)]
        clients = one.enrol(ids[0], "a", "b")
        one.start(ids[0])
        tasks = one.training(clients)
        two = start()
        line.cut()
        wait_for("the handover", lambda: set(two.registry.leases.held) == set(ids))
        answer = one.http.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["detail"].startswith("the object store does not answer")
        assert one.http.get(f"/v1/federations/{ids[0]}", headers=OPERATOR).status_code == 503
        assert two.http.get("/readyz").status_code == 200
        two_s = [ScriptedClient(two.http, ids[0], client.name, client.accuracy, client.sent) for client in clients]
        answer_all(two_s, tasks)
        drive(two_s)
        line.mend()
        wait_for("the object store", lambda: one.http.get("/readyz").status_code == 200)
        wait_for("the way", lambda: one.http.get(f"/v1/federations/{ids[0]}", headers=OPERATOR).status_code == 307)


@pytest.mark.usefixtures("quick_watch")
def test_without_any_object_store_all_wait_until_it_is_back(
    start: Start, object_server: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Line(object_server.endpoint) as line:
        one, two = (through(line, start, monkeypatch) for _ in range(2))
        id, clients = enrolled(one, "a", "b", name="eyes")
        one.start(id)
        tasks = one.training(clients)

        def answers(server: InThread) -> bool:
            return server.http.get(f"/v1/federations/{id}", headers=OPERATOR).status_code == 200

        line.cut()
        for server in (one, two):
            wait_for("the loss", lambda server=server: server.registry.leases.stale)
        line.mend()
        wait_for("a holder", lambda: answers(one) or answers(two))
        server = one if answers(one) else two
        again = [ScriptedClient(server.http, id, client.name, client.accuracy, client.sent) for client in clients]
        answer_all(again, tasks)
        drive(again)


def test_operators_and_the_audit_log_are_everybody_s(start: Start) -> None:
    one, two = start(), start()
    made = one.post("/v1/operators", {"name": "eve", "role": "viewer", "hours": 1}, status=201)
    hers = {"Authorization": f"Bearer {made['token']}"}
    wait_for("her token", lambda: two.http.get("/v1/federations", headers=hers).status_code == 200)
    names = [(server, f"fed-{number}-{k}") for number, server in enumerate((one, two)) for k in range(5)]
    threads = [threading.Thread(target=lambda it=server, name=name: it.create(name=name)) for server, name in names]
    start_and_join(threads)
    entries = one.get("/v1/audit-log")["entries"]
    assert [entry["number"] for entry in entries] == list(range(1, len(entries) + 1))
    assert sum(entry["act"] == "federation-created" for entry in entries) == 10
    two.delete(f"/v1/operators/{made['id']}")
    wait_for("her token's end", lambda: one.http.get("/v1/federations", headers=hers).status_code == 401)


def test_a_token_that_one_saw_expire_has_expired_for_all(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = start(), start()
    made = one.post("/v1/operators", {"name": "eve", "role": "viewer", "hours": 1}, status=201)
    hers = {"Authorization": f"Bearer {made['token']}"}
    wait_for("her token", lambda: two.http.get("/v1/federations", headers=hers).status_code == 200)
    with monkeypatch.context() as ahead:
        ahead.setattr(clock, "utc", lambda: datetime.now(UTC) + timedelta(hours=2))
        # Again, as the scheduler does: a look at the database from before the token may be under way.
        wait_for(
            "its mark", lambda: scheduler.mark(one.registry) or any(t.expired for t in one.registry.operators.values())
        )
    for server in (two, one):
        wait_for("its end", lambda server=server: server.http.get("/v1/federations", headers=hers).status_code == 401)


def test_blobs_that_two_federations_name_stay_until_neither_does(start: Start) -> None:
    """Two federations of one seed have the same initial state, at different coordinators."""
    one, two = start(), start()
    ids = []
    for server, name in ((one, "first"), (two, "second")):
        id, _ = completed(server, "a", "b", name=name)
        ids.append(id)
    one.delete(ids[0])
    replayed = two.post(f"{ids[1]}/rounds/1/replay", {})
    assert [state["same"] for state in replayed["states"]] == [True]
    two.delete(ids[1])
    assert two.registry.blobs.all() == []


def test_one_and_several_do_not_mix(start: Start, tmp_path: Path, postgres: PostgresServer, object_store: str) -> None:
    one = start()
    shared = {"database_url": one.settings.database_url, "database_wait_seconds": 0, "store": object_store}
    alone = Settings(data_dir=tmp_path / "alone", **shared)
    with pytest.raises(CannotOpen, match="another coordinator works on the database"):
        open_store(alone)
    one.stop()
    (tmp_path / "alone").mkdir(exist_ok=True)
    (tmp_path / "alone" / "store.id").write_bytes((tmp_path / "data-0" / "store.id").read_bytes())
    store = open_store(alone)
    try:
        with pytest.raises(CannotOpen, match="another coordinator works on the database"):
            open_store(one.settings.model_copy(update={"database_wait_seconds": 0, "data_dir": tmp_path / "late"}))
    finally:
        store.close()


def test_tables_of_another_form_wait_for_the_others_to_stop(start: Start, tmp_path: Path) -> None:
    one = start()
    with one.registry.database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '0009'"))
    with pytest.raises(CannotOpen, match="other coordinators work on them: stop those first"):
        open_store(one.settings.model_copy(update={"data_dir": tmp_path / "late"}))


def test_what_a_coordinator_alone_has_created_is_taken_up(start: Start) -> None:
    one = start()
    id = one.create(name="eyes")
    with one.registry.database.write() as session:
        session.execute(text("DELETE FROM leases"))
    one.stop()
    two = start()
    assert two.get(id)["name"] == "eyes"
    assert url_of(two.http.get(f"/v1/federations/{id}", headers=OPERATOR)) == two.url


def test_all_that_several_need_is_asked_for(tmp_path: Path) -> None:
    some: dict[str, Any] = {"advertise_url": "https://a.example", "data_dir": tmp_path}
    with pytest.raises(ValidationError, match=r"share --database-url-file .* --store, --operator-token-file"):
        Settings(**some)
    given = some | {"database_url": "postgresql://db/x", "store": "s3://bucket", "operator_token_file": tmp_path / "t"}
    with pytest.raises(ValidationError, match="--signing-key-file"):
        Settings(**given)
    given |= {"signing_key_file": tmp_path / "k"}
    assert Settings(**given).advertise_url == "https://a.example"
    with pytest.raises(ValidationError, match="--bootstrap is for one coordinator alone"):
        Settings(**given, bootstrap=tmp_path / "spec.yaml")
    with pytest.raises(ValidationError, match="unencrypted"):
        Settings(**given | {"advertise_url": "http://a.example"})
    with pytest.raises(ValidationError, match="must be an address"):
        Settings(**given | {"advertise_url": "a.example"})
