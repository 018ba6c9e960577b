"""Answers for everyone, without a token: health and metrics, the operator's page, methods, keys and certificates."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Header, Path, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.staticfiles import StaticFiles

from promptfed.coordinator.http.callers import authority
from promptfed.coordinator.http.deps import RegistryOf, SettingsOf, SignerOf, documented
from promptfed.coordinator.problems import NotFound, NotReady
from promptfed.shared import methods
from promptfed.shared.api.api_schemas import Health, MethodList, MethodView, SigningKey
from promptfed.shared.service.static_page import MEDIA_TYPES, StaticPage
from promptfed.shared.spec.spec import SpecError

router = APIRouter()
PAGE = StaticPage("promptfed.coordinator", images="'self'")
CONTENT: dict[str, dict[str, str]] = {kind.split(";")[0]: {} for kind in MEDIA_TYPES.values()}
_DESCRIBED: dict[tuple[object, ...], bytes] = {}

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


@router.get("/healthz", responses=documented(), tags=["health"])
async def healthz() -> Health:
    """The process is alive."""
    return Health(status="ok")


@router.get("/readyz", responses=documented(NotReady), tags=["health"])
def readyz(registry: RegistryOf) -> Health:
    """Ready: the store can be written, and the engine runs."""
    if registry.away:
        raise NotReady("the database is away")
    if not registry.ready:
        raise NotReady("the engine is stopping")
    if (why := registry.writable.why_not()) is not None:
        raise NotReady(why)
    return Health(status="ok")


@router.get(
    "/metrics",
    tags=["health"],
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {}}, "description": "Prometheus, without the names of clients"},
        **documented(),
    },
)
async def metrics(registry: RegistryOf) -> Response:
    """Prometheus metrics."""
    return Response(registry.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


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


@router.get("/v1/methods", response_model=MethodList, responses=documented(), tags=["methods"])
async def list_methods() -> Response:
    """All methods of this coordinator."""
    known = tuple(methods.METHODS[name] for name in sorted(methods.METHODS))
    if known not in _DESCRIBED:  # a thread is not kept for what anybody may ask
        _DESCRIBED[known] = await run_sync(_described)
    return Response(_DESCRIBED[known], media_type="application/json")


def _described() -> bytes:
    every = [MethodView.model_validate(methods.describe(name)) for name in sorted(methods.METHODS)]
    return MethodList(methods=every).model_dump_json().encode()


@router.get("/openapi.json", include_in_schema=False)
async def get_openapi(request: Request) -> Response:
    """The description of the API, which takes long to make: once in a process."""
    state = request.app.state
    if not hasattr(state, "described"):
        state.described = json.dumps(request.app.openapi()).encode()
    return Response(state.described, media_type="application/json")


@router.get("/v1/methods/{name}", responses=documented(NotFound), tags=["methods"])
def get_method(name: Annotated[str, Path(max_length=100)]) -> MethodView:
    """One method by its name."""
    try:
        return MethodView.model_validate(methods.describe(name))
    except SpecError as error:
        raise NotFound(error.errors[0]["detail"]) from None


@router.get("/v1/signing-key", responses=documented(), tags=["results"])
async def get_signing_key(signer: SignerOf) -> SigningKey:
    """The public key that verifies this coordinator's signatures. Keep a copy from a coordinator that you trust."""
    return SigningKey(public_key=signer.public_key)


@router.get("/v1/authority", responses=documented(NotFound), response_class=PlainTextResponse, tags=["enrolment"])
def get_authority(settings: SettingsOf) -> str:
    """The last certificate of this coordinator's TLS chain, in PEM. Trust it only by its fingerprint."""
    certificate = authority(settings)
    if certificate is None:
        raise NotFound("this coordinator serves no TLS: there is no certificate")
    return certificate


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
