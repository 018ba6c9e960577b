"""JSON as it arrives, of callers with a token, within limits of size and time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

from fastapi.dependencies.models import Dependant
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.callers import is_let_in, look_up
from promptfed.coordinator.http.uploads import expect_same
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
            receive = JsonBody(scope, receive, self._seconds)
        await self._app(scope, receive, send)


class JsonBody:
    """One request's body. The caller is looked up only when the body is read: most requests have none."""

    def __init__(self, scope: Scope, receive: Receive, seconds: float):
        """``scope`` and ``receive`` are the request's."""
        self._scope = scope
        self._receive = receive
        self._seconds = seconds
        self._received = 0
        self._until: float | None = None
        self._whole = False
        self._announced = digests.sha256_in(Headers(scope=scope).get(digests.CONTENT))
        self._digest = hashlib.sha256()

    async def __call__(self) -> Message:
        """The next part.

        Raises:
            HTTPException: it arrives too late, or exceeds the limit.
            DigestMismatch: the body has another digest than was announced.
        """
        if self._whole:  # What comes now is that the caller has gone.
            return await self._receive()
        if self._until is None:
            if not await _may_call(self._scope):
                self._whole = True
                return NOTHING
            self._until = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._seconds:g} s") from None
        part = message.get("body", b"")
        self._received += len(part)
        if self._received > JSON_BYTES:
            raise HTTPException(413)
        self._whole = not message.get("more_body", False)
        if self._announced is not None:
            self._digest.update(part)
            if self._whole and message["type"] == "http.request":
                expect_same("sha256:" + self._digest.hexdigest(), "sha256:" + self._announced.hex())
        return message


async def _may_call(scope: Scope) -> bool:
    """Whether the request's token is valid for its route. The route checks again, and refuses."""
    connection = HTTPConnection(scope)
    scheme, token = get_authorization_scheme_param(connection.headers.get("authorization"))
    if scheme.lower() != "bearer" or not token:
        return False
    registry: Registry = scope["app"].state.registry
    try:
        caller = look_up(connection, registry, digest(token))
    except Refusal:
        return False
    federation = connection.path_params.get("federation")
    return all(is_let_in(caller, name, federation, registry) for name in _schemes(scope["route"].dependant))


def _schemes(dependant: Dependant) -> Iterator[str]:
    """The names of the security schemes among a route's dependencies."""
    if isinstance(dependant.call, SecurityBase):
        yield dependant.call.scheme_name
    for inner in dependant.dependencies:
        yield from _schemes(inner)
