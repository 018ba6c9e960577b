"""Files as answers: the bytes that the framework's own would give, with its headers."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import FileResponse

from promptfed.coordinator.http.bodies import PART, BlobFile

SIZES = (0, 1, PART - 1, PART, PART + 1, 3 * PART + 5)


def answer(response: FileResponse, verb: str = "GET", **headers: str) -> list[dict[str, Any]]:
    """All messages of an answer, each body as it was when all had been sent."""
    asked = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": verb, "headers": asked, "asgi": {"spec_version": "2.3"}}
    sent: list[dict[str, Any]] = []

    async def play() -> None:
        async def receive() -> Any:
            await asyncio.sleep(3600)

        async def send(message: Any) -> None:
            sent.append(message)

        await response(scope, receive, send)

    asyncio.run(play())
    return [message | {"body": bytes(message["body"])} if "body" in message else message for message in sent]


def whole(messages: list[dict[str, Any]]) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body; nothing comes after the end."""
    head, *parts = messages
    assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]
    return head["status"], head["headers"], b"".join(part["body"] for part in parts)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_answered_as_the_framework_would(size: int, tmp_path: Path) -> None:
    path, content = tmp_path / "blob", os.urandom(size)
    path.write_bytes(content)
    options: dict[str, Any] = {"media_type": "application/octet-stream", "headers": {"ETag": '"x"'}}
    for verb, headers in (("GET", {}), ("HEAD", {}), ("GET", {"range": "bytes=0-0"}), ("GET", {"range": "bytes=-3"})):
        ours, theirs = (whole(answer(kind(path, **options), verb, **headers)) for kind in (BlobFile, FileResponse))
        assert ours == theirs, (verb, headers)
    found = answer(BlobFile(path, **options))
    assert whole(found)[2] == content
    assert max(len(message.get("body", b"")) for message in found) <= PART


def test_what_is_being_sent_outlives_its_file_and_is_let_go_of_afterwards(tmp_path: Path) -> None:
    path, content = tmp_path / "blob", os.urandom(2 * PART)
    path.write_bytes(content)
    scope = {"type": "http", "method": "GET", "headers": [], "asgi": {"spec_version": "2.3"}}
    kept: list[memoryview] = []

    async def play() -> None:
        async def send(message: Any) -> None:
            if isinstance(message.get("body"), memoryview):
                path.unlink(missing_ok=True)
                kept.append(message["body"])  # as a connection does whose reader is slow

        await BlobFile(path, media_type="application/octet-stream")(scope, asyncio.Event().wait, send)

    asyncio.run(play())
    assert b"".join(kept) == content
    mapped = kept[0].obj
    assert isinstance(mapped, mmap.mmap)
    with pytest.raises(BufferError):
        mapped.close()
    kept.clear()
    gc.collect()
    mapped.close()
