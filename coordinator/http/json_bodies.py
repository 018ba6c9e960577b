"""JSON as it arrives, of callers with a token, within limits of size and time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import closing

from fastapi.dependencies.models import Dependant
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.callers import Caller, ClientCaller, is_let_in, look_up
from promptfed.coordinator.http.uploads import BEHIND_SECONDS, LEAST_RATE, ClientPlaces, Incoming, Uploads, expect_same
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.store.tokens import digest
from promptfed.shared.service import digests

JSON_BYTES = 8 << 20
TENSOR_PATHS = ("/update", "/exchange", "/initial-state")
NOTHING: Message = {"type": "http.request", "body": b"", "more_body": False}


class JsonBodies:
    """Passes on bodies of callers with a token, up to a size and within ``seconds``.

    The framework's own limit answers in plain text; this one raises within the request, so that it becomes a problem.
    """

    def __init__(self, app: ASGIApp, seconds: float):
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with a limited body."""
        if scope["type"] == "http" and not scope["path"].endswith(TENSOR_PATHS):
            with closing(JsonBody(scope, receive, self._seconds)) as body:
                await self._app(scope, body, send)
        else:
            await self._app(scope, receive, send)


class JsonBody:
    """One request's body. The caller is looked up only when the body is read: most requests have none.

    It comes at `LEAST_RATE`, and counts among the bodies of its client until it is whole.
    """

    def __init__(self, scope: Scope, receive: Receive, seconds: float):
        """``scope`` and ``receive`` are the request's."""
        self._scope = scope
        self._receive = receive
        self._seconds = seconds
        self._received = 0
        self._until: float | None = None
        self._last = 0.0  # when it has to be whole
        self._whole = False
        self._counted: tuple[Incoming, ClientPlaces] | None = None
        self._announced = digests.sha256_in(Headers(scope=scope).get(digests.CONTENT))
        self._digest = hashlib.sha256()

    async def __call__(self) -> Message:
        """Receive the next part of the body.

        Raises:
            HTTPException: it arrives too late or too slowly, or exceeds the limit.
            TooManyUploads: too many of its client's are under way.
            DigestMismatch: the body has another digest than was announced.
        """
        if self._whole:  # What comes now is that the caller has gone.
            return await self._receive()
        now = asyncio.get_running_loop().time
        if self._until is None:
            caller = await _caller(self._scope)
            if caller is None:
                self._whole = True
                return NOTHING
            if isinstance(caller, ClientCaller):
                body = Incoming(self._receive, 0, (caller.federation, caller.client.name))
                self._counted = body, self._uploads.enter(body)
            self._last = now() + self._seconds
            self._until = min(self._last, now() + BEHIND_SECONDS)
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            slow = f"nor at {LEAST_RATE:,} bytes a second after {BEHIND_SECONDS:g} s"
            raise HTTPException(408, f"the body did not arrive within {self._seconds:g} s, {slow}") from None
        part = message.get("body", b"")
        self._until = min(self._last, now() + BEHIND_SECONDS, self._until + len(part) / LEAST_RATE)
        self._received += len(part)
        if self._received > JSON_BYTES:
            raise HTTPException(413)
        self._whole = not message.get("more_body", False)
        if self._whole:
            self.close()
        if self._announced is not None:
            self._digest.update(part)
            if self._whole and message["type"] == "http.request":
                expect_same("sha256:" + self._digest.hexdigest(), "sha256:" + self._announced.hex())
        return message

    def close(self) -> None:
        """Free what the body holds: it is whole, or its request is over."""
        if self._counted is not None:
            self._uploads.leave(*self._counted)
            self._counted = None

    @property
    def _uploads(self) -> Uploads:
        uploads: Uploads = self._scope["app"].state.uploads
        return uploads


async def _caller(scope: Scope) -> Caller | None:
    """Whose token the request has, if it is valid for its route. The route checks again, and refuses."""
    connection = HTTPConnection(scope)
    scheme, token = get_authorization_scheme_param(connection.headers.get("authorization"))
    if scheme.lower() != "bearer" or not token:
        return None
    registry: Registry = scope["app"].state.registry
    try:
        caller = look_up(connection, registry, digest(token))
    except Refusal:
        return None
    federation, schemes = connection.path_params.get("federation"), _schemes(scope["route"].dependant)
    return caller if all(is_let_in(caller, name, federation, registry) for name in schemes) else None


def _schemes(dependant: Dependant) -> Iterator[str]:
    """The names of the security schemes among a route's dependencies."""
    if isinstance(dependant.call, SecurityBase):
        yield dependant.call.scheme_name
    for inner in dependant.dependencies:
        yield from _schemes(inner)
