"""Headers of every answer, and what a group of coordinators needs: redirects to the holder of a federation, CORS."""

from __future__ import annotations

import asyncio
import contextlib
import re

from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.problems import FederationMoving, HeldElsewhere, Misdirected, Refusal, StoreAway
from promptfed.coordinator.store.database import DatabaseAway
from promptfed.coordinator.store.leases import Leases
from promptfed.shared.service import digests
from promptfed.shared.service.net import TOLD
from promptfed.shared.spec.section import PROTOCOL, VERSION

PROTOCOL_HEADER = PROTOCOL.lower().encode()
_SNIFFED = (b"x-content-type-options", b"nosniff")
_OF_THE_API = (_SNIFFED, (b"cache-control", b"no-store"), (PROTOCOL_HEADER, str(VERSION).encode()))


def with_headers(scope: Scope, send: Send) -> Send:
    """``send`` for the answer to a request of ``scope``, which adds its headers.

    These are ``nosniff`` on every answer, ``no-store`` and a digest of the body on those of the API. A page's own files
    say for themselves; so does a body whose digest was known, and one that is streamed has none.
    """
    of_api = scope["path"].startswith("/v1/")
    added = _OF_THE_API if of_api else (_SNIFFED,)
    names = [name for name, _ in added]
    start: Message | None = None  # of an answer whose body is awaited

    async def answer(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            told = message.get("headers", ())
            message["headers"] = [*(header for header in told if header[0] not in names), *added]
            known = {name for name, _ in told}
            if of_api and b"content-length" in known and b"repr-digest" not in known:
                start = message
                return
        elif start is not None:
            if (body := message.get("body", b"")) and not message.get("more_body", False):
                start["headers"].append((b"content-digest", digests.field_of(body).encode()))
            await send(start)
            start = None
        await send(message)

    return answer


PAGE = "Promptfed-Page"
"""The header of requests from the operator's page, since a browser does not show a page where a 307 leads."""

_PATH = re.compile(r"/v1/federations/([^/\0]{1,100})(?:/.*)?")
_FEDERATIONS = "/v1/federations"
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
    "Access-Control-Allow-Headers": f"Authorization, Content-Type, Idempotency-Key, Last-Event-ID, {PAGE}",
    "Access-Control-Max-Age": "600",
}


class Elsewhere:
    """Redirects requests (307) to the coordinator that holds their federation. If none does, requests wait.

    Callers with a valid token are told the group's addresses. The page of one coordinator may call the others.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request before its body is read, or pass it on."""
        registry: Registry | None = getattr(scope["app"].state, "registry", None)
        if scope["type"] != "http" or registry is None or registry.leases is None:
            await self._app(scope, receive, send)
            return
        headers, leases = Headers(scope=scope), registry.leases
        origin = headers.get("origin")
        if origin is not None and origin in leases.addresses:
            send = _readable_by(origin, send)
            if scope["method"] == "OPTIONS":
                await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, send)
                return
        if "authorization" not in headers:
            # Whoever has no token at all is told nothing of who carries out what.
            await self._app(scope, receive, send)
            return
        refusal = None if registry.away else await _refusal(scope, registry, leases, PAGE in headers)
        if refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send)
        elif scope["path"].startswith(_FEDERATIONS):
            await self._app(scope, receive, _telling(leases, send))
        else:
            await self._app(scope, receive, send)


async def _refusal(scope: Scope, registry: Registry, leases: Leases, of_page: bool) -> Refusal | None:
    match = _PATH.fullmatch(scope["path"])
    if match is None:
        return None
    asked = match.group(1)
    place = leases.place(asked)
    if place is None:
        # Another coordinator may have created it this very second.
        with contextlib.suppress(SQLAlchemyError):
            await asyncio.to_thread(leases.look_again)
        place = leases.place(asked)
    if place is None:
        return None
    if place.id in leases.held:
        return await _in_memory(registry, place.id)
    if place.url is None or place.url == leases.url:
        return _moving()
    text = "another coordinator carries this federation out"
    if of_page:
        return Misdirected(text, coordinator=place.url)
    query = scope["query_string"].decode("latin-1")
    raw = scope.get("raw_path") or scope["path"].encode()
    location = place.url + raw.partition(b"?")[0].decode("latin-1") + (f"?{query}" if query else "")
    return HeldElsewhere(text, headers={"Location": location})


def _telling(leases: Leases, send: Send) -> Send:
    """``send``, which adds the group's addresses to successful answers: only a valid token brings one."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 300:
            MutableHeaders(scope=message)[TOLD] = ", ".join(leases.addresses)
        await send(message)

    return tell


def _readable_by(origin: str, send: Send) -> Send:
    """``send`` for a page of another coordinator, whose browser asks whether the page may read the answer."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "*"
            headers.add_vary_header("Origin")
        await send(message)

    return tell


async def _in_memory(registry: Registry, id: str) -> Refusal | None:
    """Read a federation of this coordinator's that nobody has asked for since it was taken over."""
    if id not in registry.federations:
        try:
            await asyncio.to_thread(registry.take_up, id)
        except (Refusal, SQLAlchemyError, DatabaseAway) as error:
            if registry.leases is not None:
                registry.leases.let_go(id)  # and it is taken up again by itself
            return error if isinstance(error, Refusal) else StoreAway()
    return None if id in registry.federations else _moving()


def _moving() -> Refusal:
    return FederationMoving("this federation is being taken over: send it again")
