"""Long bodies over lines that are cut: they arrive, and nothing else than the whole is used."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from promptfed.client_service.exits import ClientError
from promptfed.client_service.http import connection, coordinator_client
from promptfed.client_service.http.bodies import Body
from promptfed.client_service.http.connection import Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.shared.messages import PROBLEM_BASE, Task
from promptfed.shared.tensors.torch_tensors import decode, decode_place
from promptfed.shared.versions import PROTOCOL, VERSION
from promptfed.testing.clients import SHAPE, ScriptedClient, secret_of, update_body
from tests.support.coordinators import InThread, in_thread
from tests.support.relay import Cut, Relay

MARK = {PROTOCOL: str(VERSION)}  # of a coordinator
M, WIDE = 16, {**SHAPE, "d_t": 16384}  # a state of a megabyte
Use = Callable[[CoordinatorClient], Awaitable[Any]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is long begins with a megabyte, and clients try again at once."""
    monkeypatch.setattr(coordinator_client, "IN_FILES", 1 << 18)
    monkeypatch.setattr(connection, "FIRST_BACKOFF", 0.02)
    monkeypatch.setattr(connection, "LONGEST_BACKOFF", 0.05)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with in_thread(tmp_path_factory.mktemp("coordinator") / "data") as server:
        yield server


@pytest.fixture
def opened(coordinator: InThread, tmp_path: Path) -> tuple[ScriptedClient, dict[str, Any], Body]:
    """A client with an open task, and an update for it."""
    federation = coordinator.create(name=tmp_path.name, method={"name": "promptfl", "m": M})
    a, b = coordinator.enrol(federation, f"{tmp_path.name}-a", f"{tmp_path.name}-b", backbone_shape=WIDE)
    coordinator.post(f"{federation}/start")
    task, _ = coordinator.training([a, b])
    return a, task, Body.of(update_body({"context": torch.ones(M, WIDE["d_t"])}, task))


def play(url: str, client: ScriptedClient, use: Use, give_up_after: float = 300.0) -> Any:
    """Whatever ``use`` does with the client's connection to ``url``."""

    async def run() -> Any:
        async with httpx.AsyncClient(trust_env=False) as http:
            given = CoordinatorClient(http, url, client.federation, give_up_after, secret_of(client.name))
            return await use(given)

    return asyncio.run(run())


def test_an_update_is_sent_again_where_the_line_was_cut(
    coordinator: InThread, opened: tuple[ScriptedClient, dict[str, Any], Body], tmp_path: Path
) -> None:
    client, task, update = opened
    path = tmp_path / "update"
    path.write_bytes(update.read())
    from_file = Body(path, update.size, update.sha256)
    with Relay(coordinator.url, [Cut(up=300_000), Cut(up=250_000), Cut(up=200_000)]) as line:
        play(line.url, client, lambda c: c.send_update(task["task_id"], from_file))
        assert line.cuts == [], "it was cut three times"
    registry = coordinator.registry
    with registry.database.read():
        assert registry.blobs.read(f"sha256:{update.sha256}") == update.read()


@pytest.mark.parametrize(("kind", "sent"), [("upload-timeout", 3), ("wrong-task", 1)])
def test_what_the_line_is_too_slow_for_is_sent_three_times(kind: str, sent: int) -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        problem = {"type": PROBLEM_BASE + kind, "title": "t", "status": 400, "detail": "d"}
        return httpx.Response(400, json=problem, headers=MARK)

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            await CoordinatorClient(http, "http://c", "f").send_update("t", Body.of(b"x" * 300_000))

    with pytest.raises(Refused, match=kind):
        asyncio.run(run())
    assert bodies == [b"x" * 300_000] * sent


def test_what_is_refused_is_refused_with_the_reason(
    coordinator: InThread, opened: tuple[ScriptedClient, dict[str, Any], Body]
) -> None:
    client, task, update = opened
    other = Body.of(update_body({"context": torch.zeros(M, WIDE["d_t"])}, {**task, "task_id": "another"}))
    with pytest.raises(Refused, match="wrong-task"):
        play(coordinator.url, client, lambda c: c.send_update(task["task_id"], other))
    play(coordinator.url, client, lambda c: c.send_update(task["task_id"], update))
    with pytest.raises(Refused, match="already-answered"):
        play(coordinator.url, client, lambda c: c.send_update(task["task_id"], other))
    with pytest.raises(Refused, match="not-found"):
        play(coordinator.url, client, lambda c: c.send_update("no-task", other))


def payload_of(task: dict[str, Any], folder: Path) -> Use:
    return lambda client: client.payload(Task.model_validate(task), folder)


def test_a_payload_goes_on_where_the_line_was_cut(
    coordinator: InThread, opened: tuple[ScriptedClient, dict[str, Any], Body], tmp_path: Path
) -> None:
    client, task, _ = opened
    folder = tmp_path / "payloads"
    folder.mkdir()
    (folder / "of-an-earlier-task").write_bytes(b"1")
    whole = client.http.get(task["payload"]["url"], headers=client.headers).content
    with Relay(coordinator.url, [Cut(down=300_000), Cut(down=250_000)]) as line:
        path = play(line.url, client, payload_of(task, folder))
        assert line.cuts == []
        assert len(whole) < line.down < 1.3 * len(whole)
        assert path.read_bytes() == whole
        assert list(folder.iterdir()) == [path], "it alone"
        before = line.down
        assert play(line.url, client, payload_of(task, folder)) == path
        assert line.down == before, "what is there is not fetched again"
    assert torch.equal(decode_place(path)[0]["context"], decode(whole)[0]["context"])


def test_a_killed_client_goes_on_with_what_it_has_of_a_payload(
    coordinator: InThread, opened: tuple[ScriptedClient, dict[str, Any], Body], tmp_path: Path
) -> None:
    client, task, _ = opened
    with Relay(coordinator.url, [Cut(down=600_000)]) as line:
        with pytest.raises(ClientError, match="no answer from the coordinator"):
            play(line.url, client, payload_of(task, tmp_path / "p"), give_up_after=0.0)
        path = play(line.url, client, payload_of(task, tmp_path / "p"))
        assert line.down < 1.3 * path.stat().st_size


def test_a_damaged_beginning_is_not_used(
    coordinator: InThread, opened: tuple[ScriptedClient, dict[str, Any], Body], tmp_path: Path
) -> None:
    client, task, _ = opened
    name = task["payload"]["sha256"].removeprefix("sha256:")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / f"{name}.part").write_bytes(bytes(1000))
    with pytest.raises(ClientError, match=r"was announced.*something on the way"):
        play(coordinator.url, client, payload_of(task, tmp_path / "p"), give_up_after=0.0)
    assert list((tmp_path / "p").iterdir()) == [], "the next attempt begins anew"
    (tmp_path / "p" / f"{name}.part").write_bytes(bytes(1000))
    path = play(coordinator.url, client, payload_of(task, tmp_path / "p"))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == name


def test_a_damaged_whole_file_is_fetched_anew(
    coordinator: InThread, opened: tuple[ScriptedClient, dict[str, Any], Body], tmp_path: Path
) -> None:
    client, task, _ = opened
    path = play(coordinator.url, client, payload_of(task, tmp_path / "p"))
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert play(coordinator.url, client, payload_of(task, tmp_path / "p")) == path
    assert path.read_bytes() == whole, "what a power cut has left under the right name is not trained on"


WHOLE = bytes(range(100))
NAME = hashlib.sha256(WHOLE).hexdigest()


def fetched(folder: Path, answers: Callable[[int, str | None], httpx.Response], **given: Any) -> Path:
    """What is fetched where ``answers`` gives each request's answer, by its number and the range that it asks for."""
    asked = iter(range(99))

    def answer(request: httpx.Request) -> httpx.Response:
        wanted = request.headers.get("range")
        assert request.headers.get("if-range") == (f'"sha256:{NAME}"' if wanted else None)
        return answers(next(asked), wanted)

    async def run() -> Path:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            client = CoordinatorClient(http, "http://c", "f", **given)
            return await coordinator_client.fetch(
                client, "/p", coordinator_client.Wanted(100, f"sha256:{NAME}"), folder
            )

    return asyncio.run(run())


def from_byte(begin: int, *parts: bytes, cut: bool = False) -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        if cut:
            raise httpx.ReadError("cut off")

    headers = MARK | {"Content-Range": f"bytes {begin}-99/100"}
    return httpx.Response(206 if begin else 200, headers=headers, content=body())


@pytest.mark.parametrize(("course", "requests"), [
    (["more", "more", "none", "none"], 4), (["none", "none"], 2), (["too much", "too much"], 2),
    (["none", "more", "none", "more", "more", "none"], None),
])  # fmt: skip
def test_a_payload_is_waited_for_as_long_as_more_of_it_comes(
    course: list[str], requests: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine seconds an attempt, and ten without progress are too long."""
    clock, synced, ranges, have = [0.0], list[Path](), list[str | None](), 0

    def answers(number: int, wanted: str | None) -> httpx.Response:
        nonlocal have
        ranges.append(wanted)
        begin, what = have, (course[number] if number < len(course) else "rest")
        clock[0] += 9
        if what == "none":
            raise httpx.ConnectError("refused")
        have += 10
        if what == "more":
            return from_byte(begin, WHOLE[begin:have], cut=True)
        return from_byte(begin, WHOLE[begin:have], bytes(200) if what == "too much" else WHOLE[have:])

    async def sleep(seconds: float) -> None:
        """At once."""

    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(coordinator_client, "sync_folder", synced.append)
    folder = tmp_path / "state" / "payloads"
    if requests is None:
        path = fetched(folder, answers, give_up_after=10.0, sleep=sleep)
        assert (path.name, path.read_bytes(), synced) == (NAME, WHOLE, [folder])
    else:
        with pytest.raises(ClientError, match="no answer from the coordinator"):
            fetched(folder, answers, give_up_after=10.0, sleep=sleep)
        assert len(ranges) == requests
    moved = [sum(what != "none" for what in course[:number]) * 10 for number in range(len(ranges))]
    assert ranges == [f"bytes={begin}-" if begin else None for begin in moved]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_payload_that_is_whole_is_not_asked_for_and_a_refusal_ends_it(tmp_path: Path) -> None:
    def refuse(number: int, wanted: str | None) -> httpx.Response:
        problem = {"type": PROBLEM_BASE + "not-found", "title": "t", "status": 404, "detail": "d"}
        return httpx.Response(404, json=problem, headers=MARK)

    with pytest.raises(Refused, match="not-found"):
        fetched(tmp_path, refuse)
    (tmp_path / f"{NAME}.part").write_bytes(WHOLE)
    assert fetched(tmp_path, refuse).read_bytes() == WHOLE


@pytest.mark.parametrize(("status", "headers", "content", "left"), [
    (206, {"Content-Range": "bytes 6-9/400000"}, b"xxx", 5),
    (206, {"Content-Range": "bytes 5-9/10"}, b"xxx", 5),
    (206, {}, b"xxx", 5),
    (206, {"Content-Range": "bytes 5-400000/400000"}, bytes(399_996), 5),
    (206, {"Content-Range": "bytes 2-400000/400000"}, bytes(399_999), 2),
    (200, {}, bytes(400_001), 0),
])  # fmt: skip
def test_an_answer_that_is_not_the_asked_for_range_is_refused(
    status: int, headers: dict[str, str], content: bytes, left: int, tmp_path: Path
) -> None:
    draft = tmp_path / "aa.part"
    draft.write_bytes(b"12345")

    async def run() -> None:
        stream = httpx.ByteStream(content)
        transport = httpx.MockTransport(lambda request: httpx.Response(status, headers=headers | MARK, stream=stream))
        async with httpx.AsyncClient(transport=transport) as http:
            wanted = coordinator_client.Wanted(400_000, "sha256:aa")
            client = CoordinatorClient(http, "http://c", "f", give_up_after=0.0)
            await coordinator_client.fetch(client, "/payload", wanted, tmp_path)

    with pytest.raises(ClientError, match="payload"):
        asyncio.run(run())
    assert draft.read_bytes() == b"12345"[:left], "of what is too much nothing is kept"
