"""Headers of every answer: browsers guess no type, caches keep nothing of the API, clients learn the version."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from promptfed.shared.spec.versions import PROTOCOL, VERSION


class AnswerHeaders:
    """``nosniff`` on every answer, ``no-store`` on those of the API. A page's own files say for themselves."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and the answer back with its headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        await self._app(scope, receive, with_headers(scope, send))


PROTOCOL_HEADER = PROTOCOL.lower().encode()
OF_THE_API = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (PROTOCOL_HEADER, str(VERSION).encode()),
)
"""What is added to an answer of the API that has none of these."""


def with_headers(scope: Scope, send: Send) -> Send:
    """``send`` for the answer to a request of ``scope``, which adds its headers."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["X-Content-Type-Options"] = "nosniff"
            if scope["path"].startswith("/v1/"):
                headers["Cache-Control"] = "no-store"
                headers[PROTOCOL] = str(VERSION)
        await send(message)

    return answer
