"""``/`` of the client's own API: a page that sends an image to ``/v1/predict``. It holds nothing of this site's."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Response

from promptfed.shared.pages import MEDIA_TYPES, page_headers

# `blob:` is the chosen image, shown from the browser's memory.
HEADERS = page_headers(images="blob:")

# Files of a page are no calls that a program makes.
router = APIRouter(include_in_schema=False)


@cache
def _content(name: str) -> bytes:
    return (files("promptfed.client_service") / "web" / name).read_bytes()


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
    return Response(_content(name), media_type=MEDIA_TYPES[PurePath(name).suffix], headers=HEADERS)
