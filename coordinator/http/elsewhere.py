"""Redirects (307) of requests about a federation that another coordinator runs, before their bodies are read."""

from __future__ import annotations

import asyncio
import contextlib
import re

from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Receive, Scope, Send

from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.answer_headers import with_headers
from promptfed.coordinator.problems import FederationMoving, HeldElsewhere, Refusal

_PATH = re.compile(r"/v1/federations/([^/\0]{1,100})(?:/.*)?")


class Elsewhere:
    """Redirects requests to the coordinator that holds their federation. If none does, requests wait."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        refusal = await _refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response(scope["path"])(scope, receive, with_headers(scope, send))


async def _refusal(scope: Scope) -> Refusal | None:
    match = _PATH.fullmatch(scope["path"])
    registry: Registry | None = getattr(scope["app"].state, "registry", None)
    if match is None or registry is None or registry.leases is None or registry.away:
        return None
    if not any(name == b"authorization" for name, _ in scope["headers"]):
        return None  # Whoever has no token at all is told nothing of who carries out what.
    asked, leases = match.group(1), registry.leases
    place = leases.place(asked)
    if place is None:
        # Another coordinator may have created it this very second.
        with contextlib.suppress(SQLAlchemyError):
            await asyncio.to_thread(leases.look_again)
        place = leases.place(asked)
    if place is None or place.id in registry.federations:
        return None
    if place.url is None or place.url == leases.url:
        return FederationMoving("this federation is being taken over: send it again")
    query = scope["query_string"].decode("latin-1")
    raw = scope.get("raw_path") or scope["path"].encode()
    location = place.url + raw.partition(b"?")[0].decode("latin-1") + (f"?{query}" if query else "")
    return HeldElsewhere("another coordinator carries this federation out", headers={"Location": location})
