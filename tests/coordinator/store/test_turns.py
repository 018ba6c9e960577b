"""One of several coordinators works and the others wait: whole takeovers, on PostgreSQL where it is installed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import OperationalError

from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.coordinator.resources.federations import routes as federations
from promptfed.coordinator.store import form, opening, turns
from promptfed.coordinator.store.backend import CannotOpen, DatabaseAway, InUse
from promptfed.coordinator.store.bucket import ObjectStoreAway
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.form import migrate
from promptfed.coordinator.store.postgres import PostgreSQL
from promptfed.coordinator.store.tables import EventRow
from promptfed.coordinator.store.turns import Turn
from promptfed.shared.machine import boot_time
from promptfed.testing.clients import ScriptedClient, drive
from tests.support.coordinators import InThread
from tests.support.open_phases import kind, launched
from tests.support.postgres import PostgresServer
from tests.support.several import OPERATOR, own_options, shared_options
from tests.support.stand_in_lock import Server, StandIn
from tests.support.waiting import wait_for

BOTH = pytest.mark.parametrize("database_url", ["postgresql", "stand-in"], indirect=True)


@pytest.fixture(params=["stand-in", pytest.param("postgresql", marks=pytest.mark.extended)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database for several coordinators: PostgreSQL, or a stand-in for its lock."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").schema())
    server = Server(tmp_path / "shared.sqlite3")
    monkeypatch.setattr(opening, "backend_of", lambda settings, holder="": StandIn(server))
    return "postgresql://stand-in/x"


@pytest.fixture
def start(tmp_path: Path, database_url: str, object_store: str) -> Iterator[Callable[..., InThread]]:
    """Starts one coordinator more on the same database and objects."""
    options = shared_options(tmp_path / "shared", database_url, object_store)
    started: list[InThread] = []

    def one_more(**own: Any) -> InThread:
        server = InThread(tmp_path / f"data-{len(started)}", **options, **own_options(), **own)
        server.operator = OPERATOR
        started.append(server)
        return server

    yield one_more
    for server in started:
        server.stop()


def works(server: InThread) -> bool:
    """Whether this one answers."""
    return server.http.get("/readyz").status_code == 200


def at(server: InThread, id: str, clients: list[ScriptedClient]) -> list[ScriptedClient]:
    """The same clients, which ask this one."""
    return [ScriptedClient(server.http, id, client.name, client.accuracy, client.sent) for client in clients]


@BOTH
def test_another_one_goes_on_where_the_first_is_gone(start: Callable[..., InThread]) -> None:
    one = start()
    wait_for("its turn", lambda: works(one))
    two = start()
    id, clients = launched(one, "a", "b", name="eyes", rounds=1)
    tasks = one.training(clients)
    assert clients[0].answer(tasks[0]).status_code == 201
    assert two.http.get("/healthz").status_code == 200
    for path in ("/readyz", "/", "/v1/methods", f"/v1/federations/{id}"):
        answer = two.http.get(path, headers=OPERATOR)
        assert (answer.status_code, kind(answer), answer.headers["retry-after"]) == (503, "waiting", "1")
        assert answer.headers["connection"] == "close"
    one.stop()
    wait_for("the takeover", lambda: works(two))
    again = at(two, id, clients)
    assert again[0].answer(tasks[0]).status_code == 200, "it has it already"
    assert again[1].answer(tasks[1]).status_code == 201
    drive(again)
    assert two.get(id)["state"] == "finished"


def stop(server: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as if it were stopped: it shows itself no more, and waits for no further turn."""
    turn, next_store = server.app.state.turn, opening.Waiting.next_store

    def take_none(waiting: opening.Waiting) -> Any:
        if waiting._settings.data_dir != server.settings.data_dir:
            return next_store(waiting)
        return waiting._stopped.wait() and None

    monkeypatch.setattr(opening.Waiting, "next_store", take_none)
    monkeypatch.setattr(turn.database.backend, "renew", lambda: turn._ended.wait())


def test_who_is_silent_is_terminated_and_answers_nothing_later(
    start: Callable[..., InThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(turns, "TURN_SECONDS", 2.5)
    one = start()
    wait_for("its turn", lambda: works(one))
    two = start()
    id, clients = launched(one, "a", "b", name="eyes", rounds=1)
    tasks = one.training(clients)
    registry = one.registry
    held: list[httpx.Response] = []
    asked = f"/v1/federations/{id}/task?wait=30&carrying={tasks[0]['task_id']}"
    poll = threading.Thread(target=lambda: held.append(one.http.get(asked, headers=clients[0].headers)))
    poll.start()
    stop(one, monkeypatch)
    wait_for("the takeover", lambda: works(two))
    poll.join(10)
    assert (held[0].status_code, kind(held[0])) == (503, "waiting"), "what it held ends"
    answer = clients[0].send(tasks[0], b"")
    assert (answer.status_code, kind(answer)) == (503, "waiting")
    with pytest.raises((DatabaseAway, RegistryClosed)), registry.change(id) as change:
        change.emit("never")
    again = at(two, id, clients)
    assert [again[k].answer(tasks[k]).status_code for k in (0, 1)] == [201, 201]
    drive(again)
    with two.registry.database.read() as session:
        assert session.scalars(select(EventRow.id).where(EventRow.kind == "never")).all() == []


def test_an_answer_that_was_computed_in_time_is_not_sent_after_it(
    start: Callable[..., InThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start()
    wait_for("its turn", lambda: works(one))
    id = one.create(name="eyes")
    turn, view = one.app.state.turn, federations._view

    def late(*about: Any) -> Any:
        found = view(*about)
        turn.end()  # as if the process had been stopped here
        return found

    with monkeypatch.context() as patched:
        patched.setattr(federations, "_view", late)
        answer = one.http.get(f"/v1/federations/{id}", headers=OPERATOR)
    assert (answer.status_code, kind(answer)) == (503, "waiting")
    wait_for("the next turn", lambda: works(one))
    assert one.app.state.turn is not turn
    assert one.get(id)["name"] == "eyes"


def test_a_machine_that_slept_lets_go_of_what_it_has_in_memory(
    start: Callable[..., InThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start()
    wait_for("its turn", lambda: works(one))
    before = one.registry
    slept = [0.0]
    monkeypatch.setattr(turns, "boot_time", lambda: boot_time() + slept[0])
    slept[0] = turns.TURN_SECONDS + 1
    assert one.http.get("/readyz").status_code == 503
    wait_for("the next turn", lambda: works(one))
    assert one.registry is not before


def test_tables_of_another_version_are_not_waited_for(
    start: Callable[..., InThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start()
    wait_for("its turn", lambda: works(one))
    monkeypatch.setattr(form, "_revisions", lambda: ["0026", "0029"])
    settings = one.settings.model_copy(update={"data_dir": tmp_path / "late", "database_wait_seconds": 0.5})
    waiting = opening.Waiting(settings)
    try:
        with pytest.raises(CannotOpen, match="have the form 0028 instead of 0029"):
            waiting.next_store()
    finally:
        waiting.close()


def test_who_has_no_object_store_neither_takes_nor_keeps_a_turn(tmp_path: Path) -> None:
    answers = [False]
    backend = StandIn(Server(tmp_path / "shared.sqlite3"))
    turn = Turn(Database(backend), lambda: answers[0])
    begun = boot_time()
    assert not turn.take(lambda: boot_time() - begun > 0.2)
    answers[0] = True
    assert turn.take(lambda: False)
    assert turn.works
    turn.end()
    assert not turn.works
    turn.database.close()
    assert StandIn(backend._server) is not None


def test_a_turn_that_is_stopped_or_over_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []
    for stopped, over in ((True, False), (False, True)):
        turn = Turn(Database(StandIn.__new__(StandIn)))
        monkeypatch.setattr(turn, "_take", lambda expects: tried.append(expects))
        if over:
            turn.end()
        assert not turn.take(lambda stopped=stopped: stopped)
    assert tried == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DatabaseAway("it is\naway"), "waiting: it is away"),
        (OperationalError("x", {}, Exception("no route")), "waiting: no route"),
    ],
)
def test_a_turn_is_tried_for_until_it_comes(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another coordinator may be about to upgrade the tables: for ``upgrade_seconds`` no tables are expected."""
    now, outcomes, expected = [1000.0], [error, error, False, True], list[bool]()
    monkeypatch.setattr(turns, "boot_time", lambda: now[0])
    turn = Turn(Database(StandIn.__new__(StandIn)))

    def take(expects: bool) -> bool:
        expected.append(expects)
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(turn, "_take", take)
    monkeypatch.setattr(turn, "_ended", SimpleNamespace(wait=wait, is_set=lambda: False))
    assert turn.take(lambda: False, 2 * turns.TRY_SECONDS)
    assert expected == [False, False, True, True]
    assert caplog.messages == [said], "said once"


def test_only_the_session_of_the_row_is_terminated(postgres: PostgresServer) -> None:
    url = postgres.schema()
    first, second = (PostgreSQL(url, "http://same", holder) for holder in ("first", "second"))
    one, two = Database(first), Database(second)
    try:
        one.come_back()
        migrate(one)
        assert first.renew()
        second.terminate_silent(5.0)
        with pytest.raises(InUse):
            two.come_back()
        assert first.renew()
        assert not second.renew(), "who has not got the lock does not say that it is there"
        second.terminate_silent(-1.0)
        two.come_back()
        second.terminate_silent(5.0)  # its own row is fresh, and an earlier one of its own is terminated
        assert not first.renew()
        with pytest.raises(DatabaseAway), one.write() as session:
            session.execute(text("SELECT 1"))
    finally:
        one.close()
        two.close()


class Beats:
    """The end of a turn, which comes after so many of its beats."""

    def __init__(self, count: int):
        self.left, self.over = count, False

    def wait(self, seconds: float) -> bool:
        assert seconds in (turns.RENEW_SECONDS, turns.LOOK_SECONDS)
        self.left -= 1
        return self.over or self.left < 0

    def set(self) -> None:
        self.over = True

    def is_set(self) -> bool:
        return self.over


@pytest.mark.parametrize(
    ("ago", "answers", "renewal", "ends", "renewed", "said"),
    [
        (1.0, True, True, False, True, None),
        (1.0, True, False, True, True, None),
        (5.0, True, True, True, False, None),
        (1.0, False, True, False, False, "the object store does not answer: another coordinator takes over"),
        (1.0, True, DatabaseAway("x"), False, False, "the sign of life could not be written: DatabaseAway"),
        (1.0, True, OperationalError("x", {}, Exception()), False, False,
         "the sign of life could not be written: OperationalError"),
    ],
)  # fmt: skip
def test_a_turn_is_kept_by_signs_of_life(
    ago: float,
    answers: bool,
    renewal: bool | Exception,
    ends: bool,
    renewed: bool,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def renew() -> bool:
        if isinstance(renewal, Exception):
            raise renewal
        return renewal

    now = 1000.0
    monkeypatch.setattr(turns, "boot_time", lambda: now)
    database: Any = SimpleNamespace(away=None, backend=SimpleNamespace(renew=renew))
    turn = Turn(database, lambda: answers)
    beats: Any = Beats(3)
    turn._ended, turn._renewed = beats, now - ago
    turn._renew_all()
    assert (beats.over, turn._renewed == now) == (ends, renewed)
    assert caplog.messages == ([said] if said is not None else []), "said once"


def test_a_turn_works_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(turns, "boot_time", lambda: now[0])
    database: Any = SimpleNamespace(away=None)
    turn = Turn(database)
    assert not turn.works, "it was not taken yet"
    turn._renewed = now[0]
    for later, works in ((turns.TURN_SECONDS, True), (turns.TURN_SECONDS + 0.01, False)):
        now[0] = 1000.0 + later
        assert turn.works is works
    now[0] = 1000.0
    database.away = "gone"
    assert not turn.works
    database.away = None
    turn.end()
    assert not turn.works


def test_an_object_store_that_is_silent_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, away = [1000.0], [True]
    monkeypatch.setattr(turns, "boot_time", lambda: now[0])

    def probe(writes: bool) -> None:
        assert not writes
        if away[0]:
            raise ObjectStoreAway("it is away")

    monkeypatch.setattr(turns.threading.Thread, "start", lambda thread: None)
    bucket: Any = SimpleNamespace(probe=probe)
    watch = turns.ObjectsWatch(bucket)
    assert (watch.answers(), caplog.messages) == (False, []), "it has never answered"
    away[0] = False
    watch._look()
    assert watch.answers()
    away[0] = True
    for later, answers in ((turns.AWAY_SECONDS - 0.01, True), (turns.AWAY_SECONDS, False)):
        now[0] = 1000.0 + later
        assert watch.answers() is answers
        watch._look()
        assert caplog.messages == ["it is away"]
    beats: Any = Beats(2)
    watch._ended, away[0] = beats, False
    watch._look_all()
    assert (watch.answers(), beats.left) == (True, -1)
    watch.end()
    assert beats.over
