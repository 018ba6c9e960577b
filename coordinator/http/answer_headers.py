"""Headers of every answer: browsers guess no type, caches keep nothing of the API, clients learn the version."""

from __future__ import annotations

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
_SNIFFED = (b"x-content-type-options", b"nosniff")
_OF_THE_API = (_SNIFFED, (b"cache-control", b"no-store"), (PROTOCOL_HEADER, str(VERSION).encode()))


def with_headers(scope: Scope, send: Send) -> Send:
    """``send`` for the answer to a request of ``scope``, which adds its headers."""
    added = _OF_THE_API if scope["path"].startswith("/v1/") else (_SNIFFED,)
    names = [name for name, _ in added]

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [header for header in message.get("headers", ()) if header[0] not in names]
            message["headers"] = [*kept, *added]
        await send(message)

    return answer
