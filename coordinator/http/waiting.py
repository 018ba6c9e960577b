"""What one of several coordinators answers: all requests while it has its turn, and that it waits otherwise."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from promptfed.coordinator.problems import Waiting
from promptfed.coordinator.store.turns import Turn


class _Over(Exception):
    """The turn ended while an answer was sent."""


class InTurn:
    """Passes requests on while ``app.state.turn`` has a turn that works; an answer that comes later is not sent."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        turn: Turn | None = scope["app"].state.turn
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif turn is not None and turn.works:
            await self._pass_on(turn, scope, receive, send)
        elif scope["path"] == "/healthz":
            await JSONResponse({"status": "ok"})(scope, receive, send)
        else:
            await Waiting().response(scope["path"])(scope, receive, send)

    async def _pass_on(self, turn: Turn, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def in_turn(message: Message) -> None:
            nonlocal begun
            if not turn.works:
                raise _Over
            begun = begun or message["type"] == "http.response.body"
            await send(message)

        try:
            await self._app(scope, receive, in_turn)
        except _Over:
            if not begun:  # Otherwise the server closes the connection: the caller sees that the rest is missing.
                await Waiting().response(scope["path"])(scope, receive, send)
