"""The in-process transport: a request arrives as it was sent, an answer comes back as it was given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from promptfed.experiments.simulation.asgi_transport import InProcess

URL = "http://127.0.0.1"


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    made = FastAPI()
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 1000)

    @made.put("/things/{name}")
    async def put(name: str, request: Request, times: int = 1) -> Response:
        chunks = [chunk async for chunk in request.stream()]
        headers = {"X-Name": name, "X-Sent": request.headers["x-sent"], "X-Host": request.url.netloc}
        return Response(b"".join(chunks) * times, 201, headers)

    @made.get("/file")
    def file_() -> FileResponse:
        return FileResponse(file)

    @made.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            for part in (b"a", b"", b"bc"):
                yield part

        return StreamingResponse(parts())

    @made.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError

    @made.get("/half")
    async def half() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"a"
            raise ZeroDivisionError

        return StreamingResponse(parts())

    @made.get("/slow")
    async def slow(request: Request) -> None:
        await asyncio.sleep(60)

    return made


def run(app: FastAPI, call: Any) -> Any:
    async def main() -> Any:
        async with httpx.AsyncClient(transport=InProcess(app), base_url=URL) as http:
            found: Awaitable[Any] = call(http)
            return await found

    return asyncio.run(main())


def test_body_headers_path_and_query_arrive(app: FastAPI) -> None:
    sent = {"X-Sent": "yes"}
    answer = run(app, lambda http: http.put("/things/a%20b?times=2", content=b"\x00body", headers=sent))
    assert (answer.status_code, answer.content) == (201, b"\x00body" * 2)
    assert (answer.headers["x-name"], answer.headers["x-sent"], answer.headers["x-host"]) == ("a b", "yes", "127.0.0.1")
    assert run(app, lambda http: http.get("/nowhere")).status_code == 404


def test_files_and_streams_come_whole(app: FastAPI) -> None:
    assert run(app, lambda http: http.get("/file")).content == bytes(range(256)) * 1000
    assert run(app, lambda http: http.get("/stream")).content == b"abc"


def test_a_large_body_can_be_read_in_parts(app: FastAPI) -> None:
    """As clients read a payload of a whole tower into a file."""

    async def call(http: httpx.AsyncClient) -> bytes:
        async with http.stream("GET", "/file") as answer:
            return b"".join([part async for part in answer.aiter_raw()])

    assert run(app, call) == bytes(range(256)) * 1000


def test_what_breaks_is_a_500_or_breaks_off(app: FastAPI) -> None:
    assert run(app, lambda http: http.get("/broken")).status_code == 500
    with pytest.raises(httpx.RemoteProtocolError):
        run(app, lambda http: http.get("/half"))


def test_a_request_can_be_given_up(app: FastAPI) -> None:
    async def call(http: httpx.AsyncClient) -> None:
        async with asyncio.timeout(0.05):
            await http.get("/slow")

    with pytest.raises(TimeoutError):
        run(app, call)
