"""Clients' calls before the framework's machinery: enrolments, and polls, payloads, updates and evaluations of rounds.

They are nearly all that a coordinator is asked, and solving a declared route's dependencies costs several times what
the answer does. A request that is just as it should be is answered here, by the functions that the declared routes of
``tasks`` and ``clients`` call too. Any other one, before anything of it is read or counted, goes on to those routes,
which refuse it. What turns out wrong later, in the body or in the transaction, is refused by the application's own
handlers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from promptfed.coordinator.api import clients, tasks
from promptfed.coordinator.api.deps import CallingClient
from promptfed.coordinator.api.results import TENSORS_TYPE, tensors_at
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import audit
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.answer_headers import OF_THE_API, with_headers
from promptfed.coordinator.http.blob_file import first_byte
from promptfed.coordinator.http.body_limits import JsonBody
from promptfed.coordinator.http.callers import (
    ClientCaller,
    OperatorCaller,
    address_of,
    look_up,
    trust,
)
from promptfed.coordinator.http.uploads import Incoming, announced_digest, announced_length
from promptfed.coordinator.operations import payloads
from promptfed.coordinator.problems import DigestMissing, Refusal
from promptfed.coordinator.store.fault_points import point
from promptfed.shared.messages import EnrolRequest, EvaluationRequest
from promptfed.shared.service.addresses import HEARTBEAT

LONGEST_WAIT = 60.0
WITH_JSON = ("clients", "evaluation")
_PATH = re.compile(
    r"/v1/federations/([^/\0]{1,100})/(?:(task|clients)|tasks/([^/\0]{1,100})/(payload|update|evaluation))"
)
_WAIT = re.compile(rb"wait=(\d{1,2}(?:\.\d{1,6})?)")
_VERBS = {"clients": "POST", "task": "GET", "payload": "GET", "update": "PUT", "evaluation": "PUT"}
_HEARTBEAT = HEARTBEAT.lower().encode()
_REPLAYED: Message = {"type": "http.disconnect"}

Model = TypeVar("Model", bound=BaseModel)
Header = tuple[bytes, bytes]
_JSON: Header = (b"content-type", b"application/json")
_TENSORS: Header = (b"content-type", TENSORS_TYPE.encode())


@dataclass(frozen=True)
class _Enrolling:
    """Who comes with an enrolment token of a federation: its digest, and its name."""

    federation: Federation
    token: str
    name: str


@dataclass(frozen=True)
class _Call:
    """A request that is as it should be, as far as its head tells."""

    kind: str
    scope: Scope
    receive: Receive
    registry: Registry
    caller: CallingClient | _Enrolling
    task_id: str
    announced: str = ""  # the digest of an update
    seconds: float = 0.0  # that a poll waits


@dataclass(frozen=True)
class _Answer:
    """What is answered: a body (None: there is none) of a ``kind``, or as the framework has it (``response``)."""

    status: int = 200
    body: bytes | None = None
    kind: Header = _JSON
    etag: str | None = None
    response: Response | None = None

    async def send(self, call: _Call, send: Send) -> None:
        """Send it as the declared routes would, with the headers of ``AnswerHeaders``, in their order."""
        if self.response is not None:
            await self.response(call.scope, call.receive, with_headers(call.scope, send))
            return
        headers = [] if self.etag is None else [(b"etag", self.etag.encode())]
        if self.body is not None:
            headers += [(b"content-length", b"%d" % len(self.body)), self.kind]
        await send({"type": "http.response.start", "status": self.status, "headers": [*headers, *OF_THE_API]})
        await send({"type": "http.response.body", "body": self.body or b""})


class _ForTheRoute(Exception):
    """The declared route is to answer; ``body`` is what was read already (None: the client has gone)."""

    def __init__(self, body: bytes | None):
        super().__init__()
        self.body = body


class RoundCalls:
    """Answers these calls, and passes all others on."""

    def __init__(self, app: ASGIApp, seconds: float):
        """``app`` is the whole application, middleware and all. ``seconds``: how long a JSON body may take."""
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        call = _call(scope, receive) if scope["type"] == "http" else None
        if call is None:
            await self._app(scope, receive, send)
            return
        try:
            answer = await self._answer(call)
        except _ForTheRoute as read:
            await self._app(scope, _again(read.body, receive), send)
            return
        except Exception as error:
            answer = await _refusal(call, error, send)
        await answer.send(call, send)
        if call.kind in ("update", "evaluation"):
            point("answer-sent")

    async def _answer(self, call: _Call) -> _Answer:
        registry, caller, task_id = call.registry, call.caller, call.task_id
        if isinstance(caller, _Enrolling):
            return await _enrolled(call, caller, self._seconds)
        if call.kind == "task":
            beats = any(name == _HEARTBEAT for name, _ in call.scope["headers"])
            task = await tasks.next_task(registry, caller, 0.0 if beats else call.seconds)
            if task is not None:
                return _Answer(body=task.encode())
            if not (beats and call.seconds):
                return _Answer(204)
            heartbeats = call.scope["app"].state.heartbeats
            return _Answer(response=tasks.WaitingPoll(registry, caller, call.seconds, heartbeats))
        if call.kind == "payload":
            if tasks.is_at_hand(registry, caller, task_id):
                return _payload(registry, caller, task_id)
            asked = next((value for name, value in call.scope["headers"] if name == b"range"), b"")
            return await run_sync(_payload, registry, caller, task_id, first_byte(asked.decode("latin-1")))
        if call.kind == "update":
            uploads = call.scope["app"].state.uploads
            return _receipt(*await tasks.take_update(_body(call), uploads, registry, caller, task_id, call.announced))
        with registry.committer.coming():
            evaluation = await _json(call, EvaluationRequest, self._seconds)
            return _receipt(*await tasks.take_evaluation(registry, caller, task_id, evaluation))


async def _enrolled(call: _Call, caller: _Enrolling, seconds: float) -> _Answer:
    connection = HTTPConnection(call.scope)
    with call.registry.committer.coming():
        request = await _json(call, EnrolRequest, seconds)
        audit.actor.set(audit.Actor(caller.name, "enrolment", address_of(connection)))
        return _receipt(
            *await clients.take_enrolment(connection, call.registry, caller.federation, caller.token, request)
        )


def _payload(registry: Registry, caller: CallingClient, task_id: str, begin: int = 0) -> _Answer:
    digest, place = payloads.served_payload(registry, caller.federation, caller.client, task_id, begin)
    etag = f'"{digest}"'
    if isinstance(place, bytes):
        return _Answer(body=place, kind=_TENSORS, etag=etag)
    return _Answer(response=tensors_at(place, {"ETag": etag}))


def _receipt(receipt: BaseModel, new: bool) -> _Answer:
    return _Answer(201 if new else 200, receipt.model_dump_json().encode())


async def _refusal(call: _Call, error: Exception, send: Send) -> _Answer:
    """The answer of the application's own handler of such an error.

    Where there is none but the last resort, that answers here, and the error is raised for the server to log it.
    """
    app: FastAPI = call.scope["app"]
    kinds = (kind for kind in type(error).__mro__ if kind not in (Exception, BaseException, object))
    handle = next((app.exception_handlers[kind] for kind in kinds if kind in app.exception_handlers), None)
    if handle is None:

        async def broken(scope: Scope, receive: Receive, send: Send) -> None:
            raise error

        last: Any = app.exception_handlers[Exception]
        await ServerErrorMiddleware(broken, last)(call.scope, call.receive, with_headers(call.scope, send))
    assert handle is not None, "the last resort raises"
    response: Any = handle(Request(call.scope, call.receive), error)
    return _Answer(response=await response)  # all of ours are coroutines


def _body(call: _Call) -> Incoming:
    length = next((value for name, value in call.scope["headers"] if name == b"content-length"), None)
    announced = announced_length(length.decode("latin-1")) if length is not None else None
    return Incoming(call.receive, announced, call.scope["state"].get("client"))


def _call(scope: Scope, receive: Receive) -> _Call | None:
    """The call, if nothing about it is unusual: nothing is read or counted unless it is."""
    match = _PATH.fullmatch(scope["path"])
    if match is None or scope.get("root_path"):
        return None
    federation, task_id, kind = match.group(1), match.group(3) or "", match.group(4) or match.group(2)
    if scope["method"] != _VERBS[kind] or (kind == "payload" and scope["query_string"]):
        return None
    seconds = _seconds_to_wait(scope) if kind == "task" else 0.0
    announced = _announced(scope) if kind == "update" else ""
    if seconds is None or announced is None or (kind in WITH_JSON and not _is_json(scope)):
        return None
    tokens = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(tokens) != 1 or not tokens[0].startswith(b"Bearer ") or tokens[0] != tokens[0].strip():
        return None
    registry: Registry | None = getattr(scope["app"].state, "registry", None)
    if registry is None:
        return None
    # A copy of the state: a route that answers after all is to know nobody whom it has not recognised itself.
    state = dict(scope.get("state", {}))
    inner = {**scope, "path_params": {"federation": federation}, "state": state}
    caller = _known(HTTPConnection(inner), registry, federation, tokens[0][7:].decode("latin-1"))
    if caller is None or isinstance(caller, _Enrolling) is not (kind == "clients"):
        return None
    trust(HTTPConnection(inner), tokens[0][7:].decode("latin-1"))
    registry.committer.notice()
    if isinstance(caller, CallingClient):
        registry.last_seen.seen(caller.client.id)
        state["client"] = (caller.federation.id, caller.client.name)
    return _Call(kind, inner, receive, registry, caller, task_id, announced, seconds)


def _announced(scope: Scope) -> str | None:
    """The digest of an update that is announced as clients do it."""
    digests = [value for name, value in scope["headers"] if name == b"content-digest"]
    try:
        return announced_digest(digests[0].decode("latin-1")) if len(digests) == 1 else None
    except DigestMissing:
        return None


def _is_json(scope: Scope) -> bool:
    return [value for name, value in scope["headers"] if name == b"content-type"] == [b"application/json"]


def _seconds_to_wait(scope: Scope) -> float | None:
    query = scope["query_string"]
    if not query:
        return 0.0
    match = _WAIT.fullmatch(query)
    seconds = float(match.group(1)) if match else LONGEST_WAIT + 1
    return seconds if seconds <= LONGEST_WAIT else None


def _known(connection: HTTPConnection, registry: Registry, asked: str, token: str) -> CallingClient | _Enrolling | None:
    """Who calls, if it takes part in the federation that it asks for, or comes with a token of it."""
    if not token:
        return None
    try:
        caller = look_up(connection, registry, token)
    except Refusal:
        return None
    if isinstance(caller, OperatorCaller):
        return None
    known = registry.federations.get(caller.federation)
    if known is None or asked not in (known.id, known.name) or known.absent is not None:
        return None
    if isinstance(caller, ClientCaller):
        return CallingClient(known, caller.client) if caller.active else None
    named = known.tokens.get(caller.token)
    return _Enrolling(known, caller.token, named.name) if named is not None else None


async def _json(call: _Call, model: type[Model], seconds: float) -> Model:
    """The body. Raises HTTPException where it is too long or takes too long, as for any route."""
    try:
        body = await Request(call.scope, JsonBody(call.scope, call.receive, seconds, known=True)).body()
    except ClientDisconnect:
        raise _ForTheRoute(None) from None
    try:
        return model.model_validate(json.loads(body))
    except (ValueError, RecursionError, ValidationError):
        raise _ForTheRoute(body) from None


def _again(body: bytes | None, receive: Receive) -> Receive:
    """What the route is to receive: the body that was read, then whatever comes."""
    messages: list[Message] = [_REPLAYED] if body is None else [{"type": "http.request", "body": body}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
