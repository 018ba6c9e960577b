"""A small federation of a real coordinator and real clients over HTTP, every byte that the clients send remembered."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from promptfed.client_service.exits import Exit
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.settings import make_settings
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import Source
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode
from tests.support.coordinators import InThread
from tests.support.waiting import PATIENCE


@dataclass
class SentRequest:
    """One request, as it went out."""

    client: str
    method: str
    url: str
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def everything(self) -> bytes:
        """All that a listener could read."""
        lines = [b"%s: %s" % pair for pair in self.headers]
        return b"\n".join([f"{self.method} {self.url}".encode(), *lines, self.body])


class RecordingTransport(httpx.AsyncHTTPTransport):
    """A network that keeps what goes out over it."""

    def __init__(self, client: str, sent: list[SentRequest]):
        super().__init__()
        self._client, self._sent = client, sent

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        self._sent.append(SentRequest(self._client, request.method, str(request.url), request.headers.raw, body))
        return await super().handle_async_request(request)


@dataclass
class FinishedRun:
    """A federation after its last evaluation."""

    folder: Path
    state: Tensors
    reports: list[dict[str, Any]]
    sent: list[SentRequest] = field(default_factory=list)

    def private(self, client: str) -> Tensors:
        """What the client keeps on its disk."""
        return decode((self.folder / client / "committed.safetensors").read_bytes())[0]


def run(
    server: InThread, spec: dict[str, Any], sources: dict[str, Source], backbone: Backbone, folder: Path
) -> FinishedRun:
    """Let one trainer per source take part to the end."""
    federation = server.post("/v1/federations", spec, status=201)["id"]
    token, sent = server.token(federation), []
    cache = FeatureCache(folder / "features")

    async def work() -> list[Exit]:
        with ThreadPoolExecutor(1) as executor:
            workers = []
            for name, source in sources.items():
                settings = make_settings(
                    coordinator=server.url, federation=federation, name=name, data="made-up", state_dir=folder / name,
                    device="cpu",
                )  # fmt: skip
                http = httpx.AsyncClient(transport=RecordingTransport(name, sent), trust_env=False, timeout=PATIENCE)
                parts = Parts(backbone, source, features=cache, enrolment_token=token)
                workers.append(Worker(settings, parts, http=http, executor=executor))
            running = [asyncio.ensure_future(worker.run()) for worker in workers]
            await asyncio.to_thread(server.until, federation, clients=_enrolled(len(sources)))
            await asyncio.to_thread(server.post, f"{federation}/start")
            return await asyncio.gather(*running)

    assert set(asyncio.run(work())) == {Exit.OK}
    found = server.get(federation)
    assert found["state"] == "finished", found["reason"]
    content = server.http.get(f"/v1/federations/{federation}/prompts", headers=server.operator).content
    reports = [server.get(f"{federation}/rounds/{round}") for round in range(found["round"] + 1)]
    return FinishedRun(folder, decode(content)[0], reports, sent)


def _enrolled(count: int) -> dict[str, int]:
    return {"trainers": count, "evaluators": 0, "withdrawn": 0}
