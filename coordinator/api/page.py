"""``/``: the operator's page. Anyone may load its files; what it shows comes from the API with the operator's token."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Annotated

from fastapi import APIRouter, Header, Path, Response, status

from promptfed.coordinator.problems import NotFound, documented
from promptfed.shared.pages import MEDIA_TYPES, page_headers

router = APIRouter(tags=["page"])

HEADERS = page_headers(images="'self'")
CONTENT: dict[str, dict[str, str]] = {kind.split(";")[0]: {} for kind in MEDIA_TYPES.values()}


@dataclass(frozen=True)
class _File:
    content: bytes
    kind: str
    etag: str


@cache
def _files() -> dict[str, _File]:
    """The page's files by name: only these are served, whatever is asked for."""
    found = {}
    for entry in (files("promptfed.coordinator.api") / "web").iterdir():
        kind = MEDIA_TYPES.get(PurePath(entry.name).suffix)
        if kind is not None:
            content = entry.read_bytes()
            found[entry.name] = _File(content, kind, f'"{hashlib.sha256(content).hexdigest()}"')
    return found


@router.get(
    "/",
    response_class=Response,
    responses={
        200: {"content": {"text/html": {}}, "description": "the page"},
        304: {"description": "it is what If-None-Match names"},
        **documented(),
    },
)
async def get_page(if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """The page with which an operator watches and steers federations."""
    return _answer("index.html", if_none_match)


@router.get(
    "/web/{file}",
    response_class=Response,
    responses={
        200: {"content": CONTENT, "description": "a file of the page"},
        304: {"description": "it is what If-None-Match names"},
        **documented(NotFound),
    },
)
async def get_file(
    file: Annotated[str, Path(max_length=100)], if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """A script, a style sheet, a picture or a licence of the page."""
    return _answer(file, if_none_match)


def _answer(name: str, known: str | None) -> Response:
    found = _files().get(name)
    if found is None:
        raise NotFound(f"the page has no file {name[:100]!r}")
    headers = {**HEADERS, "ETag": found.etag}
    if known is not None and found.etag in known:
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    return Response(found.content, media_type=found.kind, headers=headers)
