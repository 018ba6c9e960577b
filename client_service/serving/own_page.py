"""Requests that a page of elsewhere has made are refused."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from promptfed.shared.messages import PROBLEM_BASE
from promptfed.shared.service.addresses import is_loopback


class OwnPageOnly:
    """Refuses requests that a page of elsewhere has made, before anything is read.

    ``local``: the service listens on loopback and takes no token, so that a name of elsewhere in ``Host`` is a page
    that has rebound its own name to this machine (DNS rebinding): only loopback addresses and localhost are ours.
    """

    def __init__(self, app: ASGIApp, local: bool):
        self._app = app
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400 (another host) or 403 (another page)."""
        if scope["type"] == "http":
            refusal = self._refusal(Headers(scope=scope), scope)
            if refusal is not None:
                status, kind, detail = refusal
                problem = {"type": PROBLEM_BASE + kind, "title": "Not for other pages", "status": status}
                answer = JSONResponse(problem | {"detail": detail}, status, media_type="application/problem+json")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, scope: Scope) -> tuple[int, str, str] | None:
        hosts = headers.getlist("host")
        if self._local and (len(hosts) != 1 or not _is_here(hosts[0])):
            return 400, "other-host", "this service answers under addresses of this machine alone, as 127.0.0.1"
        origin = headers.get("origin")
        if origin is not None and (not hosts or urlsplit(origin).netloc.lower() != hosts[0].lower()):
            return 403, "other-origin", "another page may not call this service"
        site = headers.get("sec-fetch-site", "none")
        follows_a_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if site not in ("same-origin", "none") and not (follows_a_link and scope["path"] == "/"):
            return 403, "other-origin", "another page may not call this service"
        return None


def _is_here(host: str) -> bool:
    """Whether ``host``, with or without a port, is a loopback address or localhost."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return False
    return parts.netloc == host and "@" not in host and is_loopback(parts.hostname or "")
