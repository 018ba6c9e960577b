"""What the site's log is told of a message before it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from promptfed.client_service.http import bodies
from promptfed.client_service.http.bodies import Body, SentLog
from promptfed.shared.messages import Task

FEDERATION, UPDATE = "/v1/federations/f", "/v1/federations/f/tasks/t/update"
TENSOR = {"w": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}
NONE: dict[str, Any] = {"tensors": {}, "fields": []}
WITH_LOSS = {"tensors": {"w": "F32 [2, 1]"}, "fields": ["loss"]}


def told_of(path: str, body: Body | None) -> Mapping[str, Any]:
    lines = list[Mapping[str, Any]]()
    SentLog(lambda what, facts: lines.append({"what": what, **facts})).note("https://c", "PUT", path, body)
    [line] = lines
    return line


def as_tensors(header: Any, size: int = 0) -> bytes:
    text = json.dumps(header).encode().ljust(size)
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(("content", "about"), [
    (as_tensors(TENSOR, 119), {"tensors": {"w": "F32 [2, 1]"}, "fields": []}),
    (as_tensors(TENSOR, 120), {"tensors": {"w": "F32 [2, 1]"}, "fields": []}),
    (as_tensors(TENSOR, 121), NONE),
    (as_tensors({**TENSOR, "__metadata__": {"promptfed": '{"loss": 1}'}}), WITH_LOSS),
    (as_tensors({"__metadata__": {"format": "pt"}}), {"tensors": {}, "fields": ["format"]}),
    (as_tensors([1]), NONE), (b"no safetensors", NONE), (b"", NONE), (bytes(8), NONE),
])  # fmt: skip
def test_tensors_are_told_by_a_header_of_bounded_size(
    content: bytes, about: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MOST_HEADER", 120)
    (tmp_path / "body").write_bytes(content)
    whole = Body.of(content)
    facts = {"what": "sent", "to": "https://c", "message": "update", "task": "t", "bytes": len(content)}
    for body in (whole, Body(tmp_path / "body", whole.size, whole.sha256)):
        assert told_of(UPDATE, body) == {**facts, "sha256": whole.sha256, **about}


@pytest.mark.parametrize(("path", "about"), [
    ("/clients", {"message": "enrolment"}), ("/withdrawal", {"message": "withdrawal"}),
    ("/tasks/t/exchange", {"message": "secure sum", "task": "t", "round": 3, "phase": "train"}),
    ("/tasks/s/failure", {"message": "failure", "task": "s"}),
    ("/tasks/t/evaluation?next=15", {"message": "evaluation", "task": "t", "round": 3, "phase": "train"}),
])  # fmt: skip
def test_a_message_is_told_by_its_kind_and_task(path: str, about: Mapping[str, Any]) -> None:
    for verb, body in (("POST", None), ("GET", Body.of(b'{"a": 1, "b": null}'))):
        lines = list[tuple[str, Mapping[str, Any]]]()
        log = SentLog(lambda what, facts, lines=lines: lines.append((what, facts)), {"t": (3, "train")})
        log.note("https://c", verb, FEDERATION + path, body)
        size = {} if body is None else {"bytes": 19, "sha256": body.sha256, "fields": ["a"]}
        assert lines == [("sent", {"to": "https://c", **about, **size})]


def test_questions_are_counted_by_hour_and_recipient(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = datetime(2026, 1, 1, 9, 0, tzinfo=UTC), list[tuple[str, Mapping[str, Any]]]()
    monkeypatch.setattr(bodies, "datetime", SimpleNamespace(now=lambda zone: now))
    log = SentLog(lambda what, facts: lines.append((what, facts)))
    for minutes, address, path in (
        (0, "a", "/task?wait=1"), (59, "a", "/task?wait=1"), (59, "a", "/tasks/t/payload"),
        (60, "a", "/task?progress=0.5"), (61, "b", "/enrolment"), (62, "b", "/enrolment"),
        (24 * 60 + 62, "b", "/spends"),
    ):  # fmt: skip
        now = datetime(2026, 1, 1, 9, 0, tzinfo=UTC) + timedelta(minutes=minutes)
        log.note(address, "GET", FEDERATION + path, None)
    assert [(what, facts["to"], facts["asked"]) for what, facts in lines] == [
        ("questions", "a", {"task": 1}), ("questions", "a", {"task": 1, "payload": 1, "progress": 1}),
        ("questions", "b", {"enrolment": 1}), ("questions", "b", {"enrolment": 1, "spends": 1}),
    ]  # fmt: skip


def test_a_task_is_told_once() -> None:
    lines = list[tuple[str, Mapping[str, Any]]]()
    log = SentLog(lambda what, facts: lines.append((what, facts)))
    payload = SimpleNamespace(sha256="ab", bytes=7)
    for id in ("t", "t", "s", "t"):
        about = {"task_id": id, "kind": "train", "round": 3, "phase": "peers"}
        log.asked(cast(Task, SimpleNamespace(**about, payload=payload)))
    facts = {"kind": "train", "round": 3, "phase": "peers", "payload": "ab", "bytes": 7}
    assert lines == [("asked", {"task": id, **facts}) for id in ("t", "s", "t")]
    assert log.rounds == {"t": (3, "peers")}
