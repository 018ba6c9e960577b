"""What the application answers for each error, and its turns among several coordinators."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException

from promptfed.coordinator import app as apps
from promptfed.coordinator import problems
from promptfed.coordinator.aggregation.global_state import NoTorch
from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.coordinator.resources.clients import operations as clients
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.backend import CannotOpen, DatabaseAway
from promptfed.coordinator.store.blobs import DamagedBlob
from promptfed.coordinator.store.bucket import ObjectStoreAway

DATABASE = SimpleNamespace(is_full=lambda error: getattr(error, "errno", 0) == errno.ENOSPC)


def request(**about: Any) -> Any:
    """A request to an address of the API."""
    metrics = SimpleNamespace(refused=lambda kind, of_update: about.setdefault("counted", []).append((kind, of_update)))
    registry = SimpleNamespace(database=DATABASE, metrics=metrics)
    path = about.get("path", "/v1/x")
    known = {name: about[name] for name in ("client", "newcomer") if name in about}
    state = SimpleNamespace(**known)
    return SimpleNamespace(
        app=SimpleNamespace(state=SimpleNamespace(registry=registry)),
        url=SimpleNamespace(path=path),
        method="PATCH",
        state=state,
    )


def caused(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause
    return error


INVALID = RequestValidationError(
    [{"type": "missing", "loc": ("body", str(number)), "msg": "Field required"} for number in range(7)]
    + [{"type": "dict_type", "loc": ("body",), "msg": "x", "input": b"{}"}]
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "words"),
    [
        (problems.NotFound("no x"), 404, "not-found", "no x"),
        (caused(HTTPException(400), problems.DigestMismatch("other")), 400, "digest-mismatch", "other"),
        (HTTPException(400, "cut off"), 400, "unreadable-body", "cut off"),
        (caused(HTTPException(400), RecursionError()), 400, "unreadable-body", "nested too deeply"),
        (caused(HTTPException(400, "x"), ValueError()), 400, "unreadable-body", "the body is no UTF-8"),
        (HTTPException(404), 404, "not-found", "there is nothing at /v1/x"),
        (HTTPException(405, headers={"Allow": "GET"}), 405, "method-not-allowed", "/v1/x does not know PATCH"),
        (HTTPException(408, "too slow"), 408, "upload-timeout", "too slow"),
        (HTTPException(413), 413, "too-large", "too large for this call"),
        (HTTPException(418, "tea"), 418, "http-error", "tea"),
        (DatabaseAway("x"), 503, "store-away", ""),
        (ObjectStoreAway("x"), 503, "store-away", "the coordinator's object store is away"),
        (OSError(errno.ENOSPC, "x"), 507, "storage-full", "the disk is full"),
        (OSError(errno.EIO, "x"), 500, "internal-error", "the coordinator's store failed"),
        (OperationalError("x", {}, Exception()), 500, "internal-error", "the coordinator's store failed"),
        (NoTorch("get torch"), 503, "method-absent", "get torch"),
        (DamagedBlob("sha256:0", "x"), 503, "storage-damaged", "put a backup back"),
        (ZeroDivisionError(), 500, "internal-error", "something broke"),
        (INVALID, 422, "invalid-request", "body.0: is missing; body.1: is missing"),
    ],
)
def test_each_error_has_its_answer(error: Exception, status: int, kind: str, words: str) -> None:
    refused = apps._refusal_of(request(), error)
    assert (refused.status, refused.kind) == (status, kind)
    assert words in refused.detail
    if error is INVALID:
        assert (refused.detail.count(";"), len(refused.members["errors"])) == (4, 8), "five are said, all are listed"
        assert "Content-Type: application/json" in refused.members["errors"][7]["detail"]
    if status == 405:
        assert refused.headers["Allow"] == "GET"


@pytest.mark.parametrize("failure", [None, DatabaseAway("x"), RegistryClosed(), OSError("x"), problems.NotFound("x")])
@pytest.mark.parametrize(
    ("error", "known", "noted"),
    [
        (problems.NotFound("no x"), {"client": ("fed", "a")}, ["client"]),
        (problems.NotFound("no x"), {"newcomer": ("fed", "a", "t")}, ["newcomer"]),
        (problems.NotFound("no x"), {"client": ("fed", "a"), "newcomer": ("fed", "a", "t")}, ["client"]),
        (problems.NotFound("no x"), {}, []),
        (ZeroDivisionError(), {"client": ("fed", "a"), "newcomer": ("fed", "a", "t")}, []),
    ],
)
def test_a_refusal_is_written_down_where_its_caller_is_known(
    error: Exception,
    known: dict[str, Any],
    noted: list[str],
    failure: Exception | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found: list[str] = []

    def note(what: str) -> None:
        found.append(what)
        if failure is not None:
            raise failure

    async def of_client(*about: Any) -> None:
        assert about[1:3] == ("fed", "a")
        note("client")

    monkeypatch.setattr(clients, "record_refusal", of_client)
    monkeypatch.setattr(clients, "record_refused_enrolment", lambda *about, refusal: note("newcomer"))
    for path in ("/v1/x", "/v1/x/update"):
        found.clear()
        caplog.clear()
        about: dict[str, Any] = {"path": path, "counted": [], **known}
        answer = asyncio.run(apps._answer(request(**about), error))
        assert answer.status_code == (404 if isinstance(error, problems.Refusal) else 500)
        assert found == noted
        assert about["counted"] == [("not-found" if answer.status_code == 404 else "internal-error", path != "/v1/x")]
        told = [f"a refusal could not be written down: {type(failure).__name__}"] if failure and noted else []
        assert caplog.messages == told


class Turns:
    """Stores that come to one of several coordinators: an error, a store with a turn, or none at its end."""

    def __init__(self, *coming: Any):
        self.coming, self.done = list(coming), list[str]()

    def __call__(self, settings: Settings) -> Turns:
        return self

    def next_store(self) -> Any:
        if not self.coming:
            return None
        one = self.coming.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    def stop(self) -> None:
        self.done.append("stop")

    def close(self) -> None:
        self.done.append("close")


def test_turns_are_waited_for_until_the_end_also_past_what_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apps, "TRY_SECONDS", 0.0)
    taken, begun = list[Any](), asyncio.Event()

    async def take(app: FastAPI, store: Any, stopping: asyncio.Event) -> None:
        taken.append(store)
        begun.set()
        await stopping.wait()
        taken.append("over")

    monkeypatch.setattr(apps, "_take_turn", take)
    coming = Turns(DatabaseAway("a"), ObjectStoreAway("b"), OperationalError("x", {}, Exception("c")), "a store")
    monkeypatch.setattr(apps.opening, "Waiting", coming)
    app = FastAPI()
    app.state.settings = SimpleNamespace(advertise_url="https://x")

    async def live() -> None:
        async with apps.lifespan(app):
            await begun.wait()
        assert taken == ["a store", "over"], "what is under way has ended before the block does"
        assert app.state.failed.done()

    asyncio.run(live())
    assert coming.done == ["stop", "close"]
    assert [line.startswith("this coordinator could not take its turn: ") for line in caplog.messages] == [True] * 3


def test_what_ends_the_wait_for_turns_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps.opening, "Waiting", Turns(CannotOpen("of another version")))
    app = FastAPI()
    app.state.settings = SimpleNamespace(advertise_url="https://x")

    async def live() -> BaseException | None:
        async with apps.lifespan(app):
            await asyncio.wait([app.state.failed])
        error: BaseException | None = app.state.failed.exception()
        return error

    assert str(asyncio.run(live())) == "of another version"


@pytest.mark.parametrize("lost", [True, False])
def test_a_turn_is_worked_until_it_is_lost_or_all_ends(
    lost: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apps, "LOOK_SECONDS", 0.001)
    done: list[str] = []

    class Working:
        def __init__(self, app: FastAPI, store: Any):
            pass

        async def __aenter__(self) -> None:
            done.append("begun")

        async def __aexit__(self, *error: object) -> None:
            done.append("let go")

    monkeypatch.setattr(apps, "_working", Working)
    turn = SimpleNamespace(works=True, end=lambda: done.append("ended"))
    app = FastAPI()

    async def take() -> None:
        stopping = asyncio.Event()
        working = asyncio.create_task(apps._take_turn(app, SimpleNamespace(turn=turn), stopping))
        await asyncio.sleep(0.01)
        assert (done, working.done(), app.state.turn) == (["begun"], False, turn)
        if lost:
            turn.works = False
        else:
            stopping.set()
        await asyncio.wait_for(working, 60)

    asyncio.run(take())
    assert done == ["begun", *["ended"] * lost, "let go"]
    assert any("another coordinator may work now" in line for line in caplog.messages) == lost
