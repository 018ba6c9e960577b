"""The record of what left: complete, written before the message leaves, chained, bounded."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from promptfed.client_service.__main__ import start
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http import sent_log
from promptfed.client_service.http.bodies import Body
from promptfed.client_service.http.sent_log import FILE, SentLog, read_sent
from promptfed.client_service.settings import Settings
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors.torch_tensors import decode
from tests.client_service.conftest import MakeCoordinator, MakeWorker
from tests.support.fake_coordinator import Wire

TRAINING = TrainingSpec(learning_rate=0.1, batch_size=8).model_dump()


class Killed(BaseException):
    """Stands for kill -9."""


def messages(folder: Path) -> list[dict[str, Any]]:
    lines, wrong = read_sent(folder)
    assert wrong is None
    return [line for line in lines if line["what"] != "questions"]


def test_every_request_of_a_federation_is_in_it_before_it_leaves(
    make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator = make_coordinator(rounds=2, method={"name": "promptfl", "m": 4}, training=TRAINING)
    bodies, shown = list[bytes](), list[str]()

    def look(request: httpx.Request) -> None:
        lines = [json.loads(line) for line in (settings.state_dir / FILE).read_text().splitlines()]
        if request.method == "GET":
            assert any(line["what"] == "questions" for line in lines)
        else:
            bodies.append(request.content)
            assert lines[-1]["sha256"] == hashlib.sha256(request.content).hexdigest()

    assert (
        asyncio.run(make_worker(coordinator, http=httpx.AsyncClient(transport=Wire(coordinator.app, look))).run()) == 0
    )
    recorded = messages(settings.state_dir)
    assert [line["sha256"] for line in recorded] == [hashlib.sha256(body).hexdigest() for body in bodies]
    assert [line["bytes"] for line in recorded] == list(map(len, bodies))
    assert recorded[0]["what"] == "enrolment"
    assert set(recorded[0]["fields"]) == {name for name, value in json.loads(bodies[0]).items() if value is not None}
    updates = [(line, body) for line, body in zip(recorded, bodies, strict=True) if line["what"] == "update"]
    assert [line["round"] for line, _ in updates] == [1, 2]
    for line, body in updates:
        shapes = {name: f"F32 {list(tensor.shape)}" for name, tensor in decode(body)[0].items()}
        assert line["tensors"] == shapes
        shown.extend(f"tensor {name}: {shape}" for name, shape in shapes.items())
        assert {"task_id", "metrics", "payload_sha256"} <= set(line["fields"])
    secret = json.loads((settings.state_dir / "identity.json").read_text())["secret"]
    assert secret not in (settings.state_dir / FILE).read_text()

    assert start(settings.model_copy(update={"sent": True})) == Exit.OK
    told = capsys.readouterr().out
    assert f"{len(bodies)} messages of {sum(map(len, bodies)):,} bytes" in told
    assert all(hashlib.sha256(body).hexdigest() in told for body in bodies)
    assert shown
    assert all(text in told for text in shown)


@pytest.mark.parametrize("arrives", [False, True])
def test_a_kill_between_record_and_message_loses_no_record(
    make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings, arrives: bool
) -> None:
    coordinator = make_coordinator(rounds=1, method={"name": "promptfl", "m": 4}, training=TRAINING)

    def kill(request: httpx.Request) -> None:
        if request.url.path.endswith("/update"):
            raise Killed

    wire = Wire(coordinator.app, **{"after" if arrives else "before": kill})
    with pytest.raises(Killed):
        asyncio.run(make_worker(coordinator, http=httpx.AsyncClient(transport=wire)).run())
    assert [line["what"] for line in messages(settings.state_dir)].count("update") == 1
    assert asyncio.run(make_worker(coordinator).run()) == 0
    both = [line["sha256"] for line in messages(settings.state_dir) if line["what"] == "update"]
    assert len(both) == 2
    assert both[0] == both[1]


def test_without_room_for_the_record_nothing_leaves(
    make_coordinator: MakeCoordinator, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make_coordinator(rounds=1)

    def full(self: SentLog, path: Path) -> Any:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(SentLog, "_found", full)
    with pytest.raises(ClientError, match=r"nothing is sent unrecorded.*free some space") as caught:
        asyncio.run(make_worker(coordinator).run())
    assert caught.value.exit == Exit.STATE
    assert coordinator.calls == []


def noted(folder: Path, count: int = 6) -> SentLog:
    log = SentLog(folder)
    for number in range(count):
        log.note("https://c", "POST", f"/v1/federations/f/tasks/t{number}/failure", Body.of(b'{"type": "x"}'))
    return log


def test_changed_cut_and_reordered_lines_show_and_an_unfinished_one_is_dropped(tmp_path: Path) -> None:
    noted(tmp_path)
    path = tmp_path / FILE
    lines = path.read_text().splitlines(keepends=True)
    for changed in (
        [lines[0], lines[1].replace("13", "14"), *lines[2:]],
        [*lines[:2], *lines[3:]],
        [*lines[1:]],
        [lines[0], lines[2], lines[1], *lines[3:]],
    ):
        path.write_text("".join(changed))
        assert "the record was changed" in str(read_sent(tmp_path)[1])
    path.write_text("".join(lines) + '{"n": 7, "at"')
    SentLog(tmp_path).note("https://c", "POST", "/v1/federations/f/withdrawal", None)
    told, wrong = read_sent(tmp_path)
    assert (len(told), told[-1]["what"], wrong) == (7, "withdrawal", None)


def test_two_writers_keep_one_chain_and_resending_at_once_adds_no_line(tmp_path: Path) -> None:
    first, second = noted(tmp_path, 1), SentLog(tmp_path)
    second.note("https://c", "POST", "/v1/federations/f/withdrawal", None)
    for _ in range(3):
        first.note("https://c", "PUT", "/v1/federations/f/tasks/t/update", Body.of(b"12345678"))
    first.note("https://other", "PUT", "/v1/federations/f/tasks/t/update", Body.of(b"12345678"))
    told, wrong = read_sent(tmp_path)
    assert ([line["to"] for line in told], wrong) == (["https://c"] * 3 + ["https://other"], None)


def test_full_files_are_turned_and_the_oldest_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_log, "MOST_BYTES", 1000)
    monkeypatch.setattr(sent_log, "KEPT", 2)
    noted(tmp_path, 40)
    files = list(tmp_path.iterdir())
    assert len(files) == 3
    assert max(path.stat().st_size for path in files) < 1500
    told, wrong = read_sent(tmp_path)
    assert (told[-1]["n"], wrong) == (40, None)
    assert told[0]["n"] > 1
    SentLog(tmp_path).note("https://c", "POST", "/v1/federations/f/withdrawal", None)
    assert read_sent(tmp_path)[1] is None


def test_an_hour_of_questions_is_one_line(tmp_path: Path) -> None:
    log = SentLog(tmp_path)
    for _ in range(50):
        log.note("https://c", "GET", "/v1/federations/f/task?wait=30", None)
    told, _ = read_sent(tmp_path)
    assert len(told) <= 2  # the hour may end meanwhile
    assert told[0]["asked"] == {"task": 1}
