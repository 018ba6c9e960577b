"""The record of what left: complete, and written before the message leaves."""

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
from promptfed.client_service.http.bodies import Body
from promptfed.client_service.http.sent_log import SentLog
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.site_log import FILE, SiteLog, read, verify
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors.torch_tensors import decode
from tests.client_service.conftest import Killed, Make
from tests.support.fake_coordinator import Wire

TRAINING = TrainingSpec(learning_rate=0.1, batch_size=8).model_dump()


def messages(folder: Path) -> list[dict[str, Any]]:
    verify(folder)
    return [line for line in read(folder) if line["what"] == "sent"]


def test_every_request_of_a_federation_is_in_it_before_it_leaves(
    make: Make, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator = make.coordinator(rounds=2, method={"name": "promptfl", "m": 4}, training=TRAINING)
    bodies, shown = list[bytes](), list[str]()

    def look(request: httpx.Request) -> None:
        lines = [json.loads(line) for line in (settings.state_dir / FILE).read_text().splitlines()]
        if request.method == "GET":
            assert any(line["what"] == "questions" for line in lines)
        else:
            bodies.append(request.content)
            assert [line["sha256"] for line in lines if line["what"] == "sent"][-1] == hashlib.sha256(
                request.content
            ).hexdigest()

    assert (
        asyncio.run(make.worker(coordinator, http=httpx.AsyncClient(transport=Wire(coordinator.app, look))).run()) == 0
    )
    recorded = messages(settings.state_dir)
    assert [line["sha256"] for line in recorded] == [hashlib.sha256(body).hexdigest() for body in bodies]
    assert [line["bytes"] for line in recorded] == list(map(len, bodies))
    assert recorded[0]["message"] == "enrolment"
    assert set(recorded[0]["fields"]) == {name for name, value in json.loads(bodies[0]).items() if value is not None}
    updates = [(line, body) for line, body in zip(recorded, bodies, strict=True) if line["message"] == "update"]
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
def test_a_kill_between_record_and_message_loses_no_record(make: Make, settings: Settings, arrives: bool) -> None:
    coordinator = make.coordinator(rounds=1, method={"name": "promptfl", "m": 4}, training=TRAINING)

    def kill(request: httpx.Request) -> None:
        if request.url.path.endswith("/update"):
            raise Killed

    wire = Wire(coordinator.app, **{"after" if arrives else "before": kill})
    with pytest.raises(Killed):
        asyncio.run(make.worker(coordinator, http=httpx.AsyncClient(transport=wire)).run())
    assert [line["message"] for line in messages(settings.state_dir)].count("update") == 1
    assert asyncio.run(make.worker(coordinator).run()) == 0
    both = [line["sha256"] for line in messages(settings.state_dir) if line["message"] == "update"]
    assert len(both) == 2
    assert both[0] == both[1]


def test_without_room_for_the_record_nothing_leaves(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = make.coordinator(rounds=1)

    def full(self: SiteLog) -> Any:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(SiteLog, "_found", full)
    with pytest.raises(ClientError, match=r"nothing is done unrecorded.*free some space") as caught:
        asyncio.run(make.worker(coordinator).run())
    assert caught.value.exit == Exit.STATE
    assert coordinator.calls == []


def test_two_writers_keep_one_chain_and_resending_at_once_adds_no_line(tmp_path: Path) -> None:
    first, second = (SentLog(SiteLog(tmp_path).note) for _ in range(2))
    first.note("https://c", "POST", "/v1/federations/f/tasks/t0/failure", Body.of(b'{"type": "x"}'))
    second.note("https://c", "POST", "/v1/federations/f/withdrawal", None)
    for _ in range(3):
        first.note("https://c", "PUT", "/v1/federations/f/tasks/t/update", Body.of(b"12345678"))
    first.note("https://other", "PUT", "/v1/federations/f/tasks/t/update", Body.of(b"12345678"))
    assert [line["to"] for line in messages(tmp_path)] == ["https://c"] * 3 + ["https://other"]


def test_an_hour_of_questions_is_one_line(tmp_path: Path) -> None:
    log = SentLog(SiteLog(tmp_path).note)
    for _ in range(50):
        log.note("https://c", "GET", "/v1/federations/f/task?wait=30", None)
    told = read(tmp_path)
    assert len(told) <= 2  # the hour may end meanwhile
    assert told[0]["asked"] == {"task": 1}
