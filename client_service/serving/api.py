"""The API of a client or of a served export: its status, and predictions.

On loopback it is open; elsewhere it needs a bearer token.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Annotated, Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response, params
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.monitor import Monitor
from promptfed.client_service.serving.prediction import BadImage, NoPrompts, Predictor, TooManyPixels
from promptfed.shared.messages import PROBLEM_BASE, Problem
from promptfed.shared.service.http_connection import LimitedHttpProtocol
from promptfed.shared.service.net import bind, is_loopback, url_of
from promptfed.shared.service.reasons import why
from promptfed.shared.service.static_page import StaticPage

# `blob:` is the chosen image, shown from the browser's memory.
PAGE = StaticPage("promptfed.client_service.serving", images="blob:")

# Files of a page are no calls that a program makes.
router = APIRouter(include_in_schema=False)

MAX_IMAGE_BYTES = 20 << 20
BODY_SECONDS = 60.0  # that a body may take
HELD_BYTES = 128 << 20  # of all bodies that are read or worked on
STOP_SECONDS = 1
log = logging.getLogger("promptfed.client")
IMAGE_TYPE = "application/octet-stream"
IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "content": {IMAGE_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


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


@router.get("/")
async def page(if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """The upload page."""
    return PAGE.answer("index.html", if_none_match)


@router.get("/web/{file}")
async def page_file(file: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """Its style sheet or script."""
    try:
        return PAGE.answer(file, if_none_match)
    except KeyError:
        raise ApiProblem(404, "not-found", "Not found", "the page has no such file") from None


class Held:
    """The bytes of bodies in memory, which have a maximum together."""

    def __init__(self) -> None:
        self.bytes = 0

    def take(self, count: int) -> None:
        """Hold ``count`` bytes more. Raises ApiProblem where there is no room."""
        if self.bytes + count > HELD_BYTES:
            headers = {"Retry-After": "5", "Connection": "close"}
            detail = "other requests hold the memory for images: send it again in a moment"
            raise ApiProblem(503, "busy", "No room for the body", detail, headers)
        self.bytes += count


class ApiProblem(Exception):
    """A refusal of this API."""

    def __init__(self, status: int, kind: str, title: str, detail: str, headers: dict[str, str] | None = None):
        super().__init__(detail)
        self.problem = Problem(type=PROBLEM_BASE + kind, title=title, status=status, detail=detail)
        self.headers = headers


class ClassProbability(BaseModel):
    """One class with its probability under the learned prompts and, where the backbone reads texts, the template."""

    name: str
    probability: float
    zero_shot: float | None = None


class DomainShare(BaseModel):
    """How far the image looks like one of the federation's domains; all shares sum to 1."""

    name: str
    share: float


class Prediction(BaseModel):
    """Classes by falling probability; ``class_name`` is the first. ``domains``: where the method mixes prompts.

    ``present``: where an image may have several labels.
    """

    method: str
    round: int
    class_name: str
    classes: list[ClassProbability]
    domains: list[DomainShare] | None = None
    present: list[str] | None = None


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route as OpenAPI describes them."""
    content = {"application/problem+json": {"schema": Problem.model_json_schema()}}
    return {status: {"description": "Refused", "content": content} for status in statuses}


def create_app(monitor: Monitor, predictor: Predictor, token: str | None, host: str) -> FastAPI:
    """The API of one client. With ``token`` every call but ``/healthz`` must carry it."""
    app, guarded = _app("promptfed client", monitor.as_dict, predictor, token, host)

    @app.get("/metrics", dependencies=guarded, responses=refusals(401))
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(monitor.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def create_export_app(about: dict[str, Any], predictor: Predictor, token: str | None, host: str) -> FastAPI:
    """The API of a served export, whose status is ``about``. ``token`` as in `create_app`."""
    return _app("promptfed export", lambda: about, predictor, token, host)[0]


def _app(
    title: str, status_of: Callable[[], dict[str, Any]], predictor: Predictor, token: str | None, host: str
) -> tuple[FastAPI, list[params.Depends]]:
    """The routes of both, and what guards those that a client adds."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None)
    app.state.held = Held()
    app.state.turn = asyncio.Lock()  # in which whoever waits comes in order
    app.add_middleware(OwnPageOnly, local=token is None and is_loopback(host))

    def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiProblem(401, "unauthorized", "Unauthorized", "send this API's token as a bearer token", headers)

    guarded = [Depends(authorised)]

    @app.exception_handler(ApiProblem)
    async def problem(request: Request, error: ApiProblem) -> Response:
        body = error.problem.model_dump(exclude_none=True)
        return JSONResponse(body, error.problem.status, error.headers, media_type="application/problem+json")

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/status", dependencies=guarded, responses=refusals(401))
    async def status() -> dict[str, Any]:
        """What the service is doing."""
        return status_of()

    @app.post(
        "/v1/predict",
        dependencies=guarded,
        responses=refusals(400, 401, 403, 408, 413, 415, 422, 503),
        response_model_exclude_none=True,
        openapi_extra=IMAGE_BODY,
    )
    async def predict(request: Request, image: Annotated[bytes, Depends(image_body)]) -> Prediction:
        """Class probabilities of the image in the body, by the current prompts and, at a client, its private part."""
        return await _predicted(request, predictor, image)

    app.include_router(router)
    return app, guarded


async def _predicted(request: Request, predictor: Predictor, image: bytes) -> Prediction:
    try:
        async with request.app.state.turn:
            if await request.is_disconnected():
                raise _gone(request)
            return Prediction(**await asyncio.to_thread(predictor.predict, image))
    except NoPrompts as error:
        raise ApiProblem(503, "no-prompts", "No prompts yet", str(error), {"Retry-After": "5"}) from None
    except BadImage as error:
        raise ApiProblem(422, "bad-image", "Not an image", str(error)) from None
    except TooManyPixels as error:
        raise ApiProblem(413, "too-large", "Image too large", str(error)) from None


async def image_body(request: Request) -> AsyncIterator[bytes]:
    """The request's body, refused as soon as it is larger than ``MAX_IMAGE_BYTES``; it is held until the answer."""
    if request.headers.getlist("content-type") != [IMAGE_TYPE]:
        # A page of elsewhere cannot send this type without being asked about it first.
        raise ApiProblem(415, "media-type", "Another content type", f"send the image's bytes as {IMAGE_TYPE}")
    held: Held = request.app.state.held
    parts: list[bytes] = []
    taken = 0
    try:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    held.take(len(chunk))
                    taken += len(chunk)
                    parts.append(chunk)
                    if taken > MAX_IMAGE_BYTES:
                        detail = f"more than {MAX_IMAGE_BYTES} bytes: send a smaller image"
                        raise ApiProblem(413, "too-large", "Image too large", detail, {"Connection": "close"})
        except TimeoutError:
            detail = f"it did not arrive in {BODY_SECONDS:g} s: send a smaller image"
            raise ApiProblem(408, "too-slow", "The body is too slow", detail, {"Connection": "close"}) from None
        except ClientDisconnect:
            raise _gone(request) from None
        yield b"".join(parts)
    finally:
        held.bytes -= taken


def _gone(request: Request) -> ApiProblem:
    log.warning("%s: the caller hung up before it was answered", request.url.path)
    return ApiProblem(400, "gone", "The caller has gone", "the connection was closed")


class _Server(uvicorn.Server):
    """A server that leaves signals to the process around it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def running_api(app: FastAPI, host: str, port: int, option: str = "--api-port") -> AsyncIterator[str]:
    """Serve ``app`` on ``host`` and ``port`` (0: any free one) while the block runs; its address.

    ``option`` is the command's option for the port, for the error text.

    Raises:
        ClientError: USAGE where the address cannot be bound.
    """
    try:
        listening = bind(host, port)
    except OSError as error:
        text = f"cannot listen on {host} port {port} ({option}): {why(error)}"
        raise ClientError(Exit.USAGE, text) from None
    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    try:
        yield url_of(listening, host)
    finally:
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await asyncio.wait({serving}, timeout=STOP_SECONDS + 0.5)
        listening.close()
