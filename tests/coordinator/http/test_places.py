"""What a body may be, how long it may take and how many there may be at once, on both sides of each bound."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from promptfed.coordinator.domain.federation import Client
from promptfed.coordinator.http import json_bodies
from promptfed.coordinator.http import uploads as module
from promptfed.coordinator.http.callers import ClientCaller
from promptfed.coordinator.http.json_bodies import JsonBody
from promptfed.coordinator.http.uploads import (
    BEHIND_SECONDS,
    HELD_BYTES,
    LEAST_RATE,
    OF_ONE_CLIENT,
    SMALL,
    WAITING_BYTES,
    Incoming,
    Uploads,
    announced_digest,
    announced_length,
    expect_digest,
)
from promptfed.coordinator.problems import DigestMismatch, DigestMissing, IncompleteBody, TooManyUploads, UploadTimeout
from promptfed.coordinator.store.blobs import digest_of
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.service import digests

Nothing: Any = None


def test_a_client_s_places_are_shared_by_its_bodies_until_the_last_has_left() -> None:
    uploads, body, other = Uploads(Nothing, 4, 1.0, 1.0), Incoming(Nothing, 10, "a"), Incoming(Nothing, 10, "b")
    first, second, third = uploads.enter(body), uploads.enter(body), uploads.enter(other)
    assert first is second
    assert (first.bodies, third.bodies) == (2, 1)
    uploads.leave(body, first)
    assert uploads._by_client == {"a": first, "b": third}
    uploads.leave(body, first)
    assert uploads._by_client == {"b": third}


@pytest.mark.parametrize(
    ("length", "small", "held"),
    [
        (None, False, HELD_BYTES), (0, True, 0), (SMALL, True, SMALL), (SMALL + 1, False, SMALL + 1),
        (HELD_BYTES, False, HELD_BYTES), (HELD_BYTES + 1, False, HELD_BYTES),
    ],
)  # fmt: skip
def test_what_is_announced_says_what_is_held(length: int | None, small: bool, held: int) -> None:
    body = Incoming(Nothing, length)
    assert (body.is_small, body.held) == (small, held)
    assert announced_length(None if length is None else str(length)) == length
    assert announced_length("-1") is announced_length("x") is None


@pytest.mark.parametrize(
    ("client", "waiting", "bodies", "taken"),
    [
        ("a", 0, OF_ONE_CLIENT - 1, True), ("a", 0, OF_ONE_CLIENT, False), (None, 0, OF_ONE_CLIENT, True),
        ("a", WAITING_BYTES - 10, 0, True), ("a", WAITING_BYTES - 9, 0, False), (None, WAITING_BYTES - 9, 0, False),
    ],
)  # fmt: skip
def test_so_many_bodies_and_bytes_wait_at_once(client: str | None, waiting: int, bodies: int, taken: bool) -> None:
    uploads, body = Uploads(Nothing, 8, 1.0, 1.0), Incoming(Nothing, 10, client)
    for _ in range(bodies):
        uploads.enter(body)
    uploads._waiting_bytes = waiting
    if taken:
        assert uploads.enter(body).bodies == bodies + 1
    else:
        with pytest.raises(TooManyUploads):
            uploads.enter(body)
        assert uploads._by_client.get(client, SimpleNamespace(bodies=0)).bodies == bodies


@pytest.mark.parametrize(("most", "client", "places"), [(8, "a", 2), (8, None, 8), (3, "a", 1), (4, "a", 1)])
def test_a_client_has_a_quarter_of_the_places(most: int, client: str | None, places: int) -> None:
    assert Uploads(Nothing, most, 1.0, 1.0).enter(Incoming(Nothing, 9, client)).semaphore._value == places


def uploads_in(folder: Path, small: int = 0, wait: float = 60.0) -> tuple[Uploads, list[int]]:
    shown: list[int] = []
    metrics = SimpleNamespace(uploads=SimpleNamespace(set=shown.append))
    blobs = SimpleNamespace(temporary=lambda: folder / "part", is_small=lambda size: size <= small)
    registry: Any = SimpleNamespace(blobs=blobs, metrics=metrics)
    return Uploads(registry, 4, 60.0, wait), shown


def coming(*parts: bytes, length: int | None = None, ends: str = "http.request") -> Incoming:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": ends, "body": b"", "more_body": False})

    async def receive() -> Any:
        return messages.pop(0)

    return Incoming(receive, length, "a")


def received(uploads: Uploads, body: Incoming, limit: int, **how: Any) -> tuple[Upload, bytes | None]:
    """The upload, and what lies in its file within the block."""

    async def live() -> tuple[Upload, bytes | None]:
        async with uploads.receive(body, limit, **how) as upload:
            return upload, upload.path.read_bytes() if upload.path.exists() else None

    return asyncio.run(live())


@pytest.mark.parametrize(
    ("parts", "length", "limit", "small", "content", "too_large", "size"),
    [
        ([b"ab", b"cd"], None, 4, 4, b"abcd", False, 4),
        ([b"ab", b"cd"], None, 4, 3, None, False, 4),
        ([b"ab", b"cd"], 4, 4, 4, b"abcd", False, 4),
        ([b"abcd", b"e", b"f"], None, 9, 9, None, False, 6),
        ([b"ab", b"cd"], None, 3, 9, None, True, 4),
        ([b"ab", b"c", b"defg", b"h"], None, 3, 9, None, True, 8),
        ([b"ab", b"c", b"defgh", b"ijk", b"never read"], None, 3, 9, None, True, 11),
        ([b"never read"], 8, 3, 9, None, True, 8),
        ([b"abcdefg"], 7, 3, 9, None, True, 7),
    ],
)
def test_a_body_is_in_memory_in_a_file_or_too_large(
    parts: list[bytes], length: int | None, limit: int, small: int, content: bytes | None, too_large: bool, size: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "DRAINED", 5 if length is None else 4)
    monkeypatch.setattr(module, "CHUNK", 5)
    uploads, _ = uploads_in(tmp_path, small)
    upload, there = received(uploads, coming(*parts, length=length), limit)
    assert (upload.content, upload.too_large, upload.size) == (content, too_large, size)
    whole = b"".join(parts)
    if not too_large:
        assert upload.sha256 == digest_of(whole)
        assert there == (None if content is not None else whole)
    assert list(tmp_path.iterdir()) == [], "the file is removed with the block"
    assert (uploads._by_client, uploads._waiting_bytes, uploads._running) == ({}, 0, 0)


def test_a_body_that_ends_or_takes_too_long_is_refused_and_frees_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, shown = uploads_in(tmp_path)

    async def never() -> Any:
        await asyncio.sleep(3600)

    with pytest.raises(IncompleteBody):
        received(uploads, coming(b"ab", ends="http.disconnect"), 9)
    uploads._timeout = 0.01
    for length, seconds in ((None, 0.01), (SMALL + 1, 0.02), (9, 0.005)):
        monkeypatch.setattr(module, "BYTES_PER_SECOND", 50 * (SMALL + 1))
        monkeypatch.setattr(module, "SMALL_SECONDS", 0.005)
        with pytest.raises(UploadTimeout, match=f"within {seconds:g} s"):
            received(uploads, Incoming(never, length, "a"), 10 * SMALL)
    monkeypatch.setattr(module, "BEHIND_SECONDS", 0.001)
    with pytest.raises(UploadTimeout, match="less than 4,096 bytes a second"):
        received(uploads, Incoming(never, None, "a"), 9)
    assert (uploads._by_client, uploads._waiting_bytes, uploads._running) == ({}, 0, 0)
    assert (max(shown), shown[-1]) == (1, 0)


def test_who_waits_too_long_for_a_place_gives_up_what_it_has(tmp_path: Path) -> None:
    uploads, shown = uploads_in(tmp_path, wait=0.01)

    async def live() -> None:
        body = Incoming(Nothing, SMALL + 1, "a")
        places = uploads.enter(body)
        await uploads._take_places(places, 5)
        assert (uploads._waiting_bytes, uploads._running, places.semaphore.locked()) == (0, 1, True)
        with pytest.raises(TooManyUploads):
            await uploads._take_places(places, 5)
        uploads._places._value = 0
        other = uploads.enter(Incoming(Nothing, SMALL + 1, "b"))
        with pytest.raises(TooManyUploads):
            await uploads._take_places(other, 5)
        assert not other.semaphore.locked(), "its client's own place is free again"
        assert (uploads._waiting_bytes, uploads._running) == (0, 1)
        uploads._places._value = 3
        uploads._give_places(places)
        assert (uploads._places._value, uploads._running, places.semaphore.locked()) == (4, 0, False)

    asyncio.run(live())
    assert shown == [1, 0]


def test_a_digest_is_needed_and_the_body_s() -> None:
    good = "sha-256=:" + "A" * 43 + "=:"
    assert announced_digest(good) == "sha256:" + "00" * 32
    with pytest.raises(DigestMissing):
        announced_digest(None)
    for sha256, too_large, fits in (("x", False, True), ("y", False, False), ("y", True, True)):
        upload = Upload(Path("x"), 1, sha256, too_large)
        if fits:
            expect_digest(upload, "x")
        else:
            with pytest.raises(DigestMismatch):
                expect_digest(upload, "x")


def caller_of(found: object) -> Any:
    async def caller(scope: object) -> object:
        return found

    return caller


def test_json_of_a_client_counts_among_its_bodies_and_not_among_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads, client = Uploads(Nothing, 4, 1.0, 1.0), Client("a", "trainer", 9, (), id="cli-1", secret_digest=None)

    monkeypatch.setattr(json_bodies, "_caller", caller_of(ClientCaller("f", client, active=True)))
    uploads._waiting_bytes = WAITING_BYTES
    app = SimpleNamespace(state=SimpleNamespace(uploads=uploads))
    body = JsonBody({"type": "http", "headers": [], "app": app}, coming(b"{").receive, 60.0)
    assert asyncio.run(body())["body"] == b"{"
    assert [(of, places.bodies) for of, places in uploads._by_client.items()] == [(("f", "a"), 1)]
    assert not asyncio.run(body())["more_body"]
    assert uploads._by_client == {}


RATE, BEHIND = LEAST_RATE, BEHIND_SECONDS


@pytest.mark.parametrize(
    ("seconds", "parts", "until"),
    [
        (9.0, [(0, 0), (1, 0)], [9, 9]),
        (60.0, [(0, RATE), (0, 5 * RATE), (0, 0)], [BEHIND, BEHIND, BEHIND]),
        (60.0, [(9, RATE), (15, 2 * RATE), (20, 0)], [BEHIND, BEHIND + 1, BEHIND + 3]),
        (60.0, [(10, 99 * RATE), (11, 0)], [BEHIND, 10 + BEHIND]),
        (60.0, [(19, 99 * RATE), (38, 99 * RATE), (50, 99 * RATE), (51, 0)], [BEHIND, 19 + BEHIND, 38 + BEHIND, 60]),
    ],
)
def test_json_may_be_behind_for_a_while_and_has_to_be_whole_in_time(
    seconds: float, parts: list[tuple[float, int]], until: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part comes at its moment; it moves the end of what is waited for by what it is ahead, and no further."""
    now, ends, coming = [1000.0], list[float](), iter(parts)

    async def receive() -> Any:
        at, size = next(coming)
        now[0] = 1000.0 + at
        return {"type": "http.request", "body": bytes(size), "more_body": len(ends) < len(parts)}

    loop = SimpleNamespace(time=lambda: now[0])
    given = {"get_running_loop": lambda: loop, "timeout_at": lambda end: ends.append(end - 1000.0) or nullcontext()}
    monkeypatch.setattr(json_bodies, "_caller", caller_of("an operator"))
    monkeypatch.setattr(json_bodies, "asyncio", SimpleNamespace(**given))
    body = JsonBody({"type": "http", "headers": []}, receive, seconds)

    async def read() -> int:
        size, more = 0, True
        while more:
            message = await body()
            size, more = size + len(message["body"]), message["more_body"]
        return size

    assert asyncio.run(read()) == sum(size for _, size in parts)
    assert ends == until


PART, END, GONE = ({"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.request", "body": b"cd"},
                   {"type": "http.disconnect"})  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "announced", "refused"),
    [
        ([PART, END], None, None), ([PART, END], b"abcd", None), ([PART, END], b"cd", DigestMismatch),
        ([PART, PART], b"x", None), ([PART, GONE], b"abcd", None), ([PART, PART, END], None, HTTPException),
        ([PART, PART, END], b"ababcd", HTTPException), ([PART], None, HTTPException),
    ],
)  # fmt: skip
def test_json_is_taken_whole_up_to_its_limit_and_with_its_digest(
    messages: list[Any], announced: bytes | None, refused: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no end within its time is refused like what is too long; what was broken off is not compared."""
    monkeypatch.setattr(json_bodies, "JSON_BYTES", 4)
    monkeypatch.setattr(json_bodies, "_caller", caller_of("an operator"))
    header = [] if announced is None else [(b"content-digest", digests.field_of(announced).encode())]
    left = list(messages)

    async def receive() -> Any:
        return left.pop(0) if left else await asyncio.sleep(60)

    body = JsonBody({"type": "http", "headers": header}, receive, 60.0 if len(messages) > 1 else 0.01)

    async def read() -> None:
        for _ in range(max(2, len(messages))):
            await body()

    with nullcontext() if refused is None else pytest.raises(refused) as told:
        asyncio.run(read())
    if refused is HTTPException:
        assert told.value.status_code == (413 if len(messages) == 3 else 408)
