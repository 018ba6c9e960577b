"""The coordinator of a client without a network: a file with its tasks answers, and the client's own answer is kept.

The client runs as it does online. Its first answer that must leave is kept, and the client is stopped there, as by a
loss of the connection: it sends the same bytes again when the next file says what became of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from promptfed.shared.messages import PROBLEM_BASE, EnrolResponse
from promptfed.shared.service.airlock import Sealed
from promptfed.shared.spec.versions import PROTOCOL

NO_SECRET = "0" * 64  # the coordinator makes one itself: a client without a network needs none


@dataclass(frozen=True)
class Answer:
    """What is to leave: ``enrol``, ``update``, ``evaluation`` or ``failure``, for which task, in which bytes."""

    request: str
    task_id: str | None
    body: bytes


class AirlockTransport(httpx.AsyncBaseTransport):
    """Answers from ``tasks``; ``stop`` ends the client once there is an ``answer``, or nothing more to do.

    ``key``: the public half of the client's signing key.
    """

    def __init__(self, tasks: Sealed, key: bytes, stop: Callable[[], None]):
        self._tasks, self._key, self._stop = tasks, key, stop
        header = tasks.header
        self._task: dict[str, Any] | None = json.loads(header["task"]) if header["task"] is not None else None
        self.answer: Answer | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """What the coordinator would answer, as far as the file tells it."""
        *_, resource = parts = [part for part in request.url.path.split("/") if part][3:]
        header = self._tasks.header
        if request.method == "GET":
            return await self._told(resource, parts)
        body = await request.aread()
        if resource == "clients":
            if header["client_id"] is None:
                return await self._keep(Answer("enrol", None, self._without_secret(body)))
            known = EnrolResponse(
                client_id=header["client_id"], federation_id=header["federation"], name=header["client"]
            )
            return self._json(201, known.model_dump())
        # By HEAD and PATCH an update would come in parts: refused, it comes whole.
        is_whole = request.method in ("PUT", "POST")
        if not is_whole or len(parts) != 3 or resource not in ("update", "evaluation", "failure"):
            return self._problem(405, "not-in-files", "a client without a network cannot do this")
        return await self._settled(Answer(resource, parts[1], body))

    async def _told(self, resource: str, parts: list[str]) -> httpx.Response:
        header = self._tasks.header
        if resource == "enrolment":
            return self._json(200, header["enrolment"])
        if resource == "spends" and header["spends"] is not None:
            return self._json(200, header["spends"])
        if resource == "task":
            if header["ended"] is not None:
                return self._problem(410, "ended", header["ended"])
            return await self._wait() if self._task is None else self._json(200, self._task)
        if resource == "payload" and self._task is not None and parts[1] == self._task["task_id"]:
            return httpx.Response(200, headers=self._headers(), content=self._tasks.body)
        return self._problem(404, "not-found", "the file does not tell this")

    async def _settled(self, answer: Answer) -> httpx.Response:
        """The receipt of an answer that was given before, else the end of this run."""
        receipt = self._tasks.header["receipts"].get(answer.task_id)
        if receipt is None:
            if self._task is not None and answer.task_id == self._task["task_id"]:
                return await self._keep(answer)
            return self._problem(409, "phase-closed", "the phase of this task is over")
        if receipt["status"] == "answered":
            return self._json(200, {"task_id": answer.task_id, "status": "accepted", "sha256": receipt["sha256"]})
        return self._problem(409, "phase-closed", f"the task is {receipt['status']}")

    async def _keep(self, answer: Answer) -> httpx.Response:
        self.answer = answer
        return await self._wait()

    async def _wait(self) -> httpx.Response:
        """Stop the client, which cancels this."""
        self._stop()
        await asyncio.Event().wait()
        raise AssertionError("a stopped client goes on")

    def _without_secret(self, body: bytes) -> bytes:
        request = json.loads(body)
        request |= {"secret": NO_SECRET, "identity_key": self._key.hex(), "identity_proof": None}
        return json.dumps(request).encode()

    def _headers(self) -> dict[str, str]:
        return {PROTOCOL: str(self._tasks.header["protocol"])}

    def _json(self, status: int, content: object) -> httpx.Response:
        return httpx.Response(status, headers=self._headers(), json=content)

    def _problem(self, status: int, kind: str, detail: str) -> httpx.Response:
        content = {"type": PROBLEM_BASE + kind, "title": kind, "status": status, "detail": detail}
        return httpx.Response(status, headers=self._headers(), json=content)
