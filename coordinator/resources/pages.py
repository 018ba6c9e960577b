"""The operator's page and the description of the API, for everyone: they need no token, what is done on them does."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Annotated

from fastapi import FastAPI, Header, Path, Request, Response
from starlette.staticfiles import StaticFiles

from promptfed.coordinator.http import openapi
from promptfed.coordinator.http.openapi import documented
from promptfed.coordinator.problems import NotFound
from promptfed.shared.service.static_page import MEDIA_TYPES, StaticPage

router = openapi.router()
PAGE = StaticPage("promptfed.coordinator", images="'self'")
CONTENT: dict[str, dict[str, str]] = {kind.split(";")[0]: {} for kind in MEDIA_TYPES.values()}
START = """SwaggerUIBundle({ url: "/openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null });"""
DOCS = f"""<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>promptfed coordinator: API</title>
    <link rel="stylesheet" href="/docs/files/swagger-ui.css">
  </head>
  <body>
    <div id="api"></div>
    <script src="/docs/files/swagger-ui-bundle.js"></script>
    <script>{START}</script>
  </body>
</html>
"""
# The API's description in Swagger UI, whose files come with `fastapi-offline` and from nowhere else. It sets styles
# by script and draws its icons from data URLs.
DOCS_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src 'self' 'sha256-{base64.b64encode(hashlib.sha256(START.encode()).digest()).decode()}'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


@router.get(
    "/",
    tags=["page"],
    response_class=Response,
    responses={
        200: {"content": {"text/html": {}}, "description": "the page"},
        304: {"description": "it is what If-None-Match names"},
        **documented(),
    },
)
async def get_page(if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """The page on which operators watch and control federations."""
    return PAGE.answer("index.html", if_none_match)


@router.get(
    "/web/{file}",
    tags=["page"],
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
    try:
        return PAGE.answer(file, if_none_match)
    except KeyError:
        raise NotFound(f"the page has no file {file[:100]!r}") from None


@router.get("/openapi.json", include_in_schema=False)
async def get_openapi(request: Request) -> Response:
    """The description of the API, which takes long to make: once in a process."""
    state = request.app.state
    if not hasattr(state, "described"):
        state.described = json.dumps(request.app.openapi()).encode()
    return Response(state.described, media_type="application/json")


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """The page; it needs no token, what it tries out does."""
    headers = {
        "Content-Security-Policy": DOCS_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(DOCS, media_type="text/html; charset=utf-8", headers=headers)


def add_files_of_docs(app: FastAPI) -> None:
    """Add the files of Swagger UI."""
    app.mount("/docs/files", StaticFiles(packages=[("fastapi_offline", "static")]))
