"""A coordinator of one client, small enough to be read: tasks by script, faults on order, every byte remembered."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from promptfed.shared.data import ImageDomain, Source, Split
from promptfed.shared.data.source import reader_of
from promptfed.shared.messages import PROBLEM_BASE, EnrolmentInfo, EnrolRequest, Task
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ServerContext
from promptfed.shared.seeds import initial_draws
from promptfed.shared.service.digests import field_of
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode
from promptfed.shared.versions import PROTOCOL, VERSION
from tests.support.waiting import PATIENCE

NAMES = ["sun", "anchor", "umbrella", "pair of scissors"]
TOKEN = "enrolment-token"
FEDERATION = "fed-1"


def problem(status: int, kind: str, detail: str = "because", **headers: str) -> Response:
    """A refusal as RFC 9457 writes it, of a type of the protocol's."""
    body = {"type": PROBLEM_BASE + kind, "title": kind, "status": status, "detail": detail}
    return JSONResponse(body, status, headers, media_type="application/problem+json")


@dataclass
class FakeCoordinator:
    """Asks for ``rounds`` of training and an evaluation before and after; then the federation has ended."""

    shape: BackboneShape
    method: dict[str, Any] = field(default_factory=lambda: {"name": "promptfl", "m": 4})
    method_package: str | None = None
    rounds: int = 2
    training: dict[str, Any] = field(default_factory=lambda: TrainingSpec(learning_rate=0.1).model_dump())
    class_names: list[str] | None = field(default_factory=lambda: list(NAMES))
    template: str | None = "a photo of a {}."
    pretrained: str | None = "random"
    model: str = "promptfed-tiny"
    fingerprint: str | None = None
    protocol_version: str = str(VERSION)
    state: str = "running"
    privacy: dict[str, Any] | None = None
    secure_aggregation: dict[str, Any] | None = None  # with no rule of weights, as earlier versions had it
    seed: int = 7
    compression: dict[str, Any] = field(default_factory=dict)
    peers: list[dict[str, Any]] = field(default_factory=list)
    evaluate_every: int = 1
    poll_seconds: float = 0.05  # that a question for a task is held while it is paused
    epoch: str = "first"  # of the coordinator's process
    closed_phases: set[int] = field(default_factory=set)  # rounds whose updates come too late
    spends: list[dict[str, Any]] = field(default_factory=list)  # that it tells of
    alter: Callable[[Request], Response | None] = lambda request: None  # an answer instead of the true one
    garble: Callable[[dict[str, Any]], dict[str, Any]] = lambda task: task

    def __post_init__(self) -> None:
        method = make_method(self.method)
        context = ServerContext(TrainingSpec(**self.training), self.shape, None, (), 7, self.rounds)
        self.global_state: Tensors = method.initial_state(context, initial_draws(7))
        last = [("evaluate", self.rounds)] if self.rounds else []
        self.plan = [("evaluate", 0), *(("train", r) for r in range(1, self.rounds + 1)), *last]
        self.served: dict[int, str] = {}  # the payload's digest, by training round
        self.client: EnrolRequest | None = None
        self.accepted: dict[str, str] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self.calls: list[tuple[str, str, int]] = []
        self.received: list[bytes] = []
        self.app = self._make_app()

    @property
    def task_id(self) -> str:
        return f"task-{len(self.plan)}"

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app))

    def count(self, verb: str, path: str) -> int:
        """Calls whose path ends in ``path``."""
        return sum(call[0] == verb and call[1].endswith(path) for call in self.calls)

    def current_task(self) -> dict[str, Any]:
        kind, round = self.plan[0]
        body = encode(self.global_state)
        path = f"/v1/federations/{FEDERATION}/tasks/{self.task_id}/payload"
        if kind == "train":
            self.served[round] = "sha256:" + hashlib.sha256(body).hexdigest()
        config = {
            "method": self.method, "training": self.training,
            "backbone": {"model": self.model, "pretrained": self.pretrained, "precision": "fp32"},
            "class_names": self.class_names, "template": self.template, "rounds": self.rounds, "seed": self.seed,
            "peers": self.peers, "privacy": self.privacy, "compression": self.compression,
        }  # fmt: skip
        task = Task.model_validate({
            "task_id": self.task_id, "kind": kind, "round": round, "phase": kind,
            "deadline": datetime.now(UTC) + timedelta(seconds=60), "seconds_left": 60,
            "payload": {"url": path, "bytes": len(body), "sha256": "sha256:" + hashlib.sha256(body).hexdigest()},
            "config": config, "epoch": self.epoch,
        })  # fmt: skip
        return self.garble(task.model_dump(mode="json"))

    def _make_app(self) -> FastAPI:
        app = FastAPI()
        base = f"/v1/federations/{FEDERATION}"

        @app.middleware("http")
        async def remember(request: Request, call_next: Any) -> Response:
            body = await request.body()
            self.received.append(body)
            answer = self.alter(request) or await call_next(request)
            if (iterated := getattr(answer, "body_iterator", None)) is not None:
                content = b"".join([part async for part in iterated])
                answer = Response(content, answer.status_code, dict(answer.headers))
            if answer.body:
                answer.headers["Content-Digest"] = field_of(answer.body)
            self.calls.append((request.method, request.url.path, answer.status_code))
            answer.headers.setdefault(PROTOCOL, self.protocol_version)
            return answer

        @app.get("/v1/federations/{name}/enrolment")
        async def enrolment(name: str, request: Request) -> Response:
            if request.headers["authorization"] != f"Bearer {TOKEN}":
                return problem(401, "unauthorized", "the enrolment token is not valid")
            info = EnrolmentInfo.model_validate({
                "federation_id": FEDERATION, "name": name, "method": self.method,
                "method_package": self.method_package,
                "backbone": {
                    "model": self.model, "pretrained": self.pretrained, "precision": "fp32",
                    "fingerprint": self.fingerprint,
                },
                "class_names": self.class_names, "template": self.template, "state": self.state,
                "rounds": self.rounds, "training": self.training, "seed": self.seed,
                "privacy": self.privacy, "secure_aggregation": self.secure_aggregation,
                "evaluate_every": self.evaluate_every,
                "compression": self.compression,
            })  # fmt: skip
            return Response(info.model_dump_json(), media_type="application/json")

        @app.post(base + "/clients")
        async def enrol(request: Request) -> Response:
            asked = EnrolRequest.model_validate_json(await request.body())
            again = self.client is not None
            if self.client is not None and (asked.name, asked.secret) != (self.client.name, self.client.secret):
                return problem(409, "name-taken", "the name is taken")
            self.client = asked
            body = {"client_id": "client-1", "federation_id": FEDERATION, "name": asked.name}
            return JSONResponse(body, 200 if again else 201)

        self._add_tasks(app, base)
        return app

    def _add_tasks(self, app: FastAPI, base: str) -> None:
        @app.get(base + "/task")
        async def task(request: Request, wait: int = 30) -> Response:
            if refusal := self._refuse(request):
                return refusal
            if self.state == "paused":
                await asyncio.sleep(self.poll_seconds)
                return Response(status_code=204)
            return JSONResponse(self.current_task()) if self.plan else problem(410, "ended", "the federation finished")

        @app.get(base + "/spends")
        async def spends(request: Request) -> Response:
            told = {"federation_id": FEDERATION, "client": "hospital-a", "spends": self.spends}
            return self._refuse(request) or JSONResponse(told)

        @app.get(base + "/tasks/{task_id}/payload")
        async def payload(task_id: str, request: Request) -> Response:
            return self._refuse(request) or Response(encode(self.global_state))

        @app.put(base + "/tasks/{task_id}/update")
        async def update(task_id: str, request: Request) -> Response:
            return self._refuse(request) or self._receipt(request, self._take_update(task_id, await request.body()))

        @app.put(base + "/tasks/{task_id}/evaluation")
        async def evaluation(task_id: str, request: Request) -> Response:
            if task_id == self.task_id:
                self.evaluations.append(await request.json())
                self.plan.pop(0)
            return self._receipt(request, Response(status_code=201))

        @app.post(base + "/tasks/{task_id}/failure")
        async def failure(task_id: str, request: Request) -> Response:
            self.failures.append(await request.json())
            self.plan.pop(0)
            return JSONResponse({"task_id": task_id, "status": "failed"})

    def _refuse(self, request: Request) -> Response | None:
        if self.client is None or request.headers["authorization"] != f"Bearer {self.client.secret}":
            return problem(401, "unauthorized", "no such client")
        return None

    def _receipt(self, request: Request, answer: Response) -> Response:
        """With the next task, if there is one and that was asked for."""
        if answer.status_code not in (200, 201):
            return answer
        asked = self.plan and self.state != "paused" and "next" in request.query_params
        told = {"next": self.current_task()} if asked else {}
        task_id = request.url.path.split("/")[-2]
        return JSONResponse({"task_id": task_id, "status": "accepted", **told}, answer.status_code)

    def _take_update(self, task_id: str, body: bytes) -> Response:
        digest = hashlib.sha256(body).hexdigest()
        if task_id in self.accepted:
            same = self.accepted[task_id] == digest
            return Response(status_code=200) if same else problem(409, "already-answered")
        if task_id != self.task_id:
            return problem(409, "phase-closed")
        round = self.plan[0][1]
        if round in self.closed_phases:
            self.plan.pop(0)
            return problem(409, "phase-closed", f"the phase of round {round} is closed")
        tensors, _ = decode(body)
        self.accepted[task_id] = digest
        self.global_state = self.global_state if self.compression else tensors or self.global_state
        self.plan.pop(0)
        return Response(status_code=201)


class Wire(httpx.AsyncBaseTransport):
    """A network in front of an app: ``before`` may lose a request, ``after`` may lose its answer."""

    def __init__(
        self,
        app: FastAPI,
        before: Callable[[httpx.Request], None] = lambda request: None,
        after: Callable[[httpx.Request], None] = lambda request: None,
    ):
        self._inner = httpx.ASGITransport(app)
        self._before, self._after = before, after

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()  # a body that is streamed can be looked at too
        self._before(request)
        answer = await self._inner.handle_async_request(request)
        assert isinstance(answer.stream, AsyncIterator | httpx.AsyncByteStream)
        self._after(request)
        return answer


def made_up_source(seed: int = 0, count: int = 24, names: list[str] = NAMES) -> Source:
    """Coloured noise, one hue a class, so that there is something to learn."""
    draws = torch.Generator().manual_seed(seed)

    def split(size: int) -> Split:
        labels = torch.arange(size) % len(names)
        noise = torch.randint(0, 120, (size, 16, 16, 3), generator=draws)
        tint = torch.eye(3, dtype=torch.int64)[labels % 3] * 120
        pixels = (noise + tint[:, None, None, :]).to(torch.uint8).numpy().astype(np.uint8)
        return Split(labels, reader_of(pixels))

    return Source("made-up", tuple(names), ImageDomain("noise", "noise of a {}"), "a {}.", split(count), split(count))


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for ``condition`` while the event loop goes on; TimeoutError after ``seconds``."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.02)
