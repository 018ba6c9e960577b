"""The client's own API: its status, and predictions. On loopback it is open; elsewhere it needs a bearer token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response, params
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.monitor import Monitor
from promptfed.client_service.serving import page
from promptfed.client_service.serving.browsers import OwnPageOnly
from promptfed.client_service.serving.prediction import BadImage, NoPrompts, Predictor, TooManyPixels
from promptfed.shared.messages import PROBLEM_BASE, Problem
from promptfed.shared.service.http_connection import StrictHttpProtocol
from promptfed.shared.service.net import bind, is_loopback, url_of

MAX_IMAGE_BYTES = 20 << 20
STOP_SECONDS = 1


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
    """Classes by falling probability; ``class_name`` is the first. ``domains``: where the method mixes prompts."""

    method: str
    round: int
    class_name: str
    classes: list[ClassProbability]
    domains: list[DomainShare] | None = None


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route as OpenAPI describes them."""
    content = {"application/problem+json": {"schema": Problem.model_json_schema()}}
    return {status: {"description": "Refused", "content": content} for status in statuses}


IMAGE_TYPE = "application/octet-stream"
IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "content": {IMAGE_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


def create_app(monitor: Monitor, predictor: Predictor, token: str | None, host: str) -> FastAPI:
    """The API of one client. With ``token`` every call but ``/healthz`` must carry it."""
    app = FastAPI(title="promptfed client", docs_url=None, redoc_url=None)
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
        """What the client is doing."""
        return monitor.as_dict()

    @app.get("/metrics", dependencies=guarded, responses=refusals(401))
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(monitor.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_predict(app, predictor, guarded)
    app.include_router(page.router)
    return app


def _add_predict(app: FastAPI, predictor: Predictor, guarded: list[params.Depends]) -> None:
    @app.post(
        "/v1/predict",
        dependencies=guarded,
        responses=refusals(400, 401, 403, 413, 415, 422, 503),
        response_model_exclude_none=True,
        openapi_extra=IMAGE_BODY,
    )
    async def predict(image: Annotated[bytes, Depends(image_body)]) -> Prediction:
        """Class probabilities of the image in the body, from the current prompts with the private part."""
        try:
            return Prediction(**await asyncio.to_thread(predictor.predict, image))
        except NoPrompts as error:
            raise ApiProblem(503, "no-prompts", "No prompts yet", str(error), {"Retry-After": "5"}) from None
        except BadImage as error:
            raise ApiProblem(422, "bad-image", "Not an image", str(error)) from None
        except TooManyPixels as error:
            raise ApiProblem(413, "too-large", "Image too large", str(error)) from None


async def image_body(request: Request) -> bytes:
    """The request's body, refused as soon as it is larger than ``MAX_IMAGE_BYTES``."""
    if request.headers.getlist("content-type") != [IMAGE_TYPE]:
        # A page of elsewhere cannot send this type without being asked about it first.
        raise ApiProblem(415, "media-type", "Another content type", f"send the image's bytes as {IMAGE_TYPE}")
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_IMAGE_BYTES:
            detail = f"the body is larger than {MAX_IMAGE_BYTES} bytes: send a smaller image"
            raise ApiProblem(413, "too-large", "Image too large", detail, {"Connection": "close"})
    return bytes(content)


class _Server(uvicorn.Server):
    """A server that leaves signals to the process around it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def running_api(app: FastAPI, host: str, port: int) -> AsyncIterator[str]:
    """Serve ``app`` on ``host`` and ``port`` (0: any free one) while the block runs; its address.

    Raises:
        ClientError: USAGE where the address cannot be bound.
    """
    try:
        listening = bind(host, port)
    except OSError as error:
        text = f"the client's API cannot listen on {host} port {port}: {error.strerror}: give another --api-port"
        raise ClientError(Exit.USAGE, text) from None
    config = uvicorn.Config(
        app,
        http=StrictHttpProtocol,
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
