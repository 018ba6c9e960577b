"""Three coordinators on one database, disturbed in every way: a short run of ``benchmarks.takeover``."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from promptfed.shared.methods import METHODS
from tests.support.object_store import ObjectStoreServer
from tests.support.postgres import PostgresServer
from tests.support.stale_answers import Witness, version_of
from tests.support.takeovers import Group, campaign
from tests.support.two_phase import TwoPhase
from tests.support.waiting import wait_for


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_however_holders_are_disturbed_the_run_is_the_undisturbed_one(
    tmp_path: Path, postgres: PostgresServer, object_store: str, object_server: ObjectStoreServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)
    group = Group(tmp_path, postgres.schema(), object_store, dict(object_server.environment))
    try:
        wanted = {"kill": 2, "stop": 1, "inside": 1, "cut": 1, "store": 1, "freeze": 1}
        found = campaign(wanted, 12, ["promptfl", "two_phase"], 0, tmp_path, group)
    finally:
        group.close()
    assert found["disturbances"] == wanted
    assert found["updates"] > 0
    assert found["stale_answers"] == []
    assert found["watched_answers"] > 0
    assert found["takeover_seconds"]["most"] < 10


def view(
    round: int, phase: str | None, answered: int = 0, closing: bool = False, state: str = "running"
) -> dict[str, Any]:
    """What a coordinator says of a federation, as far as the witness looks."""
    stage = {"phase": phase, "closing": closing} if phase is not None else None
    names = [str(number) for number in range(answered)]
    return {"id": "fed-1", "state": state, "round": round, "stage": stage, "answered": names, "failed": []}


def test_versions_grow_with_a_run() -> None:
    run = [
        view(0, None, state="enrolling"), view(0, "evaluate"), view(1, "first"), view(1, "first", 1),
        view(1, "first", 2, closing=True), view(1, "second"), view(1, "second", 2), view(1, "evaluate"),
        view(2, "first"), view(2, None, state="finished"),
    ]  # fmt: skip
    versions = [version for each in run if (version := version_of(each, ["first", "second"])) is not None]
    assert len(versions) == len(run)
    assert versions == sorted(set(versions))
    assert version_of(view(1, None), ["first"]) is None
    assert version_of(view(1, None, state="paused"), ["first"]) is None


def test_the_witness_notices_an_older_state() -> None:
    """One of two coordinators shows the round before."""
    rounds = {"/a": 2, "/b": 2}

    class Coordinator(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(view(rounds[self.path[:2]], "first")).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Coordinator)
    threading.Thread(target=server.serve_forever).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    witness = Witness([f"{url}/a", f"{url}/b"], "eyes", {})
    witness.phases = ["first"]
    try:
        with witness.watching():
            wait_for("answers", lambda: witness.answers >= 4)
            assert witness.stale == []
            rounds["/b"] = 1
            stale = wait_for("a stale answer", lambda: witness.stale)
        assert {answer["url"] for answer in stale} == {f"{url}/b"}
    finally:
        server.shutdown()
        server.server_close()
