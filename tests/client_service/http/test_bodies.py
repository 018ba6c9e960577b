"""What the site's log is told of a body before it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from promptfed.client_service.http import bodies
from promptfed.client_service.http.bodies import Body, SentLog

UPDATE = "/v1/federations/f/tasks/t/update"
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
