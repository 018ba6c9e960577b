"""Generated bad updates against the public door: refused, nothing changed, nothing left, memory flat."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from promptfed.testing.clients import content_digest, update_body
from tests.support.coordinators import InThread, in_thread
from tests.support.open_phases import kind, open_first_phase, stored_rows
from tests.support.waiting import PATIENCE

LIMITS = {"max_bytes": 4096, "max_update_norm": 1000.0}


def refusal(response: httpx.Response) -> str:
    """The kind of a refusal, which must be one of ours."""
    assert 400 <= response.status_code < 500, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found = response.json()
    assert found["status"] == response.status_code
    return kind(response)


def url_of(federation: str, task: dict[str, Any]) -> str:
    return f"/v1/federations/{federation}/tasks/{task['task_id']}/update"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "I64"]) | json_values,
        "shape": st.lists(st.integers(-1, 2**64), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 2**64), min_size=2, max_size=2) | json_values,
    },
)
headers_of_files = st.dictionaries(
    st.sampled_from(["context", "__metadata__"]) | st.text(max_size=12), entries | json_values, max_size=4
)


def test_files_with_any_header_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with in_thread(tmp_path_factory.mktemp("headers") / "data") as coordinator:
        federation, (a, _), (task, _) = open_first_phase(coordinator, admission=LIMITS)
        before = stored_rows(coordinator.registry, federation)

        @settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
        @given(headers_of_files, st.binary(max_size=200), st.integers(0, 2**64 - 1) | st.none())
        def one(header: dict[str, Any], data: bytes, length: int | None) -> None:
            text = json.dumps(header).encode()
            size = len(text) if length is None else length
            assert refusal(a.send(task, size.to_bytes(8, "little") + text + data))

        one()
        assert stored_rows(coordinator.registry, federation) == before


def test_bodies_that_break_off_leave_nothing(tmp_path: Path) -> None:
    """Whoever announces more than it sends, or nonsense chunks, is hung up on."""
    with in_thread(tmp_path / "data") as coordinator:
        federation, (a, _), (task, _) = open_first_phase(coordinator, admission=LIMITS)
        before = stored_rows(coordinator.registry, federation)
        body = update_body({"context": torch.ones(4, 8)}, task)
        for framing, sent in (
            (f"Content-Length: {len(body) + 1}", body),
            (f"Content-Length: {len(body)}", body[:50]),
            ("Content-Length: 10", b""),
            ("Transfer-Encoding: chunked", b"5\r\nabc"),
            ("Transfer-Encoding: chunked", b"zz\r\nabc\r\n0\r\n\r\n"),
            ("Transfer-Encoding: chunked", b"10\r\n" + body[:16] + b"\r\n"),
            (f"Content-Length: 5\r\nContent-Length: {len(body)}", body),
            (f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked", body),
            ("Content-Length: -1", body),
        ):
            answer = raw_put(coordinator, url_of(federation, task), a.headers, body, framing, sent)
            assert not answer.startswith("HTTP/1.1 2"), answer
            assert not answer.startswith("HTTP/1.1 5"), answer
        assert stored_rows(coordinator.registry, federation) == before
        assert list(coordinator.registry.blobs.incoming.iterdir()) == []
        assert a.send(task, body).status_code == 201


def raw_put(coordinator: InThread, url: str, headers: dict[str, str], body: bytes, framing: str, sent: bytes) -> str:
    """The first line that comes back, if any, when ``sent`` is sent and then no more."""
    host, port = coordinator.url.removeprefix("http://").split(":")
    lines = [f"PUT {url} HTTP/1.1", f"Host: {host}", f"Content-Digest: {content_digest(body)}", framing]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + sent)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(4096).decode(errors="replace").split("\r\n")[0]
