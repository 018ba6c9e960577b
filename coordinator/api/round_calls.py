"""The calls of a round before the framework's machinery: polls, payloads, updates and evaluations of known clients.

They are nearly all that a coordinator is asked, and solving a declared route's dependencies costs several times what
the answer does. A request that is just as it should be is answered here, by the functions that the declared routes of
``tasks`` call too; any other one, before anything of it is read or counted, goes on to those routes, which refuse it.
What turns out wrong later, in the body or in the transaction, is refused by the application's own handlers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from promptfed.coordinator.api import tasks
from promptfed.coordinator.api.deps import CallingClient
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.body_limits import JsonBody
from promptfed.coordinator.http.callers import ClientCaller, look_up_own, may_be_foreign, trust
from promptfed.coordinator.http.uploads import announced_digest
from promptfed.coordinator.problems import DigestMissing, Refusal
from promptfed.coordinator.store.fault_points import point
from promptfed.shared.messages import EvaluationRequest

LONGEST_WAIT = 60.0
_PATH = re.compile(r"/v1/federations/([^/\0]{1,100})/(?:task|tasks/([^/\0]{1,100})/(payload|update|evaluation))")
_WAIT = re.compile(rb"wait=(\d{1,2}(?:\.\d{1,6})?)")
_VERBS = {"task": "GET", "payload": "GET", "update": "PUT", "evaluation": "PUT"}
_REPLAYED: Message = {"type": "http.disconnect"}


@dataclass(frozen=True)
class _Call:
    """A request that is as it should be, as far as its head tells."""

    kind: str
    request: Request
    registry: Registry
    caller: CallingClient
    task_id: str


class _ForTheRoute(Exception):
    """The declared route is to answer; ``body`` is what was read already (None: the client has gone)."""

    def __init__(self, body: bytes | None):
        super().__init__()
        self.body = body


class RoundCalls:
    """Answers these calls, and passes all others on."""

    def __init__(self, app: ASGIApp, seconds: float):
        """``seconds``: how long a JSON body may take."""
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        call = _call(scope, receive) if scope["type"] == "http" else None
        if call is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await self._answer(call)
        except _ForTheRoute as read:
            await self._app(scope, _again(read.body, receive), send)
            return
        except Exception as error:
            handle = _handler(scope["app"], error)
            if handle is None:
                raise
            response = await handle(call.request, error)  # all of ours are coroutines
        await response(scope, receive, send)
        if call.kind in ("update", "evaluation"):
            point("answer-sent")

    async def _answer(self, call: _Call) -> Response:
        if call.kind == "task":
            return await tasks.answer_poll(call.registry, call.caller, _seconds_to_wait(call.request.scope) or 0.0)
        if call.kind == "payload":
            if tasks.is_at_hand(call.registry, call.caller, call.task_id):
                return tasks.answer_payload(call.registry, call.caller, call.task_id)
            return await run_sync(tasks.answer_payload, call.registry, call.caller, call.task_id)
        if call.kind == "update":
            announced = announced_digest(call.request.headers.get("content-digest"))
            return _json(*await tasks.take_update(call.request, call.registry, call.caller, call.task_id, announced))
        evaluation = await _evaluation(call.request, self._seconds)
        return _json(*await tasks.take_evaluation(call.registry, call.caller, call.task_id, evaluation))


def _json(receipt: BaseModel, new: bool) -> Response:
    return Response(receipt.model_dump_json(), 201 if new else 200, media_type="application/json")


def _call(scope: Scope, receive: Receive) -> _Call | None:
    """The call, if nothing about it is unusual: nothing is read or counted unless it is."""
    match = _PATH.fullmatch(scope["path"])
    if match is None or scope.get("root_path"):
        return None
    federation, task_id, kind = match.group(1), match.group(2) or "", match.group(3) or "task"
    headers = scope["headers"]
    if scope["method"] != _VERBS[kind] or not _is_plain(kind, scope):
        return None
    tokens = [value for name, value in headers if name == b"authorization"]
    if len(tokens) != 1 or not tokens[0].startswith(b"Bearer ") or tokens[0] != tokens[0].strip():
        return None
    registry: Registry | None = getattr(scope["app"].state, "registry", None)
    if registry is None:
        return None
    # A copy of the state: a route that answers after all is to know nobody whom it has not recognised itself.
    inner = {**scope, "path_params": {"federation": federation}, "state": dict(scope.get("state", {}))}
    caller = _known(HTTPConnection(inner), registry, federation, tokens[0][7:].decode("latin-1"))
    if caller is None:
        return None
    request = Request(inner, receive)
    request.state.client = (caller.federation.id, caller.client.name)
    return _Call(kind, request, registry, caller, task_id)


def _is_plain(kind: str, scope: Scope) -> bool:
    """Whether query and headers are what clients send."""
    if kind == "task":
        return _seconds_to_wait(scope) is not None
    if kind == "update":
        digests = [value for name, value in scope["headers"] if name == b"content-digest"]
        try:
            return len(digests) == 1 and bool(announced_digest(digests[0].decode("latin-1")))
        except DigestMissing:
            return False
    if kind == "evaluation":
        kinds = [value for name, value in scope["headers"] if name == b"content-type"]
        return kinds == [b"application/json"]
    return True


def _seconds_to_wait(scope: Scope) -> float | None:
    query = scope["query_string"]
    if not query:
        return 0.0
    match = _WAIT.fullmatch(query)
    seconds = float(match.group(1)) if match else LONGEST_WAIT + 1
    return seconds if seconds <= LONGEST_WAIT else None


def _known(connection: HTTPConnection, registry: Registry, asked: str, token: str) -> CallingClient | None:
    """Who calls, if it is a client that takes part in the federation that it asks for."""
    if not token or may_be_foreign(connection, token):
        return None
    try:
        caller = look_up_own(connection, registry, token)
        if not isinstance(caller, ClientCaller) or not caller.active:
            return None
        known = registry.federations.get(caller.federation)
        if known is None or asked not in (known.id, known.name) or known.absent is not None:
            return None
    except Refusal:
        return None
    trust(connection, token)
    registry.last_seen.seen(caller.client.id)
    return CallingClient(known, caller.client)


async def _evaluation(request: Request, seconds: float) -> EvaluationRequest:
    """The body. Raises HTTPException where it is too long or takes too long, as for any route."""
    try:
        body = await Request(request.scope, JsonBody(request.scope, request.receive, seconds)).body()
    except ClientDisconnect:
        raise _ForTheRoute(None) from None
    try:
        return EvaluationRequest.model_validate(json.loads(body))
    except (ValueError, RecursionError, ValidationError):
        raise _ForTheRoute(body) from None


def _again(body: bytes | None, receive: Receive) -> Receive:
    """What the route is to receive: the body that was read, then whatever comes."""
    messages: list[Message] = [_REPLAYED] if body is None else [{"type": "http.request", "body": body}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _handler(app: FastAPI, error: Exception) -> Callable[[Request, Any], Any] | None:
    """The application's handler of such an error; None where only the last resort is left, which logs it."""
    kinds = (kind for kind in type(error).__mro__ if kind not in (Exception, BaseException, object))
    return next((app.exception_handlers[kind] for kind in kinds if kind in app.exception_handlers), None)
