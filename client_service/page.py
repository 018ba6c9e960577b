"""``/`` of the client's own API: a page that sends an image to ``/v1/predict``. It holds nothing of this site's."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Response

KINDS = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
# The page's own files and the API beside it; `blob:` is the chosen image, shown from the browser's memory.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

# Files of a page are no calls that a program makes.
router = APIRouter(include_in_schema=False)


@cache
def _content(name: str) -> bytes:
    return (files("client_service") / "web" / name).read_bytes()


@router.get("/")
async def page() -> Response:
    """The upload page."""
    return _file("index.html")


@router.get("/web/page.css")
async def style() -> Response:
    """Its style sheet."""
    return _file("page.css")


@router.get("/web/page.js")
async def script() -> Response:
    """Its script."""
    return _file("page.js")


def _file(name: str) -> Response:
    return Response(_content(name), media_type=KINDS[name], headers=HEADERS)
