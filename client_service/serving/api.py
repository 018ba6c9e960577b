"""The API of a client or of a served export: its status, and predictions.

On loopback it is open; elsewhere it needs a bearer token.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response, params
from pydantic import BaseModel
from starlette.responses import JSONResponse

from promptfed.client_service.monitor import Monitor
from promptfed.client_service.serving.image_bodies import IMAGE_BODY, Held, gone, image_body
from promptfed.client_service.serving.own_page import OwnPageOnly
from promptfed.client_service.serving.page import router
from promptfed.client_service.serving.prediction import BadImage, NoPrompts, Predictor, TooManyPixels
from promptfed.client_service.serving.problems import ApiProblem, refusals
from promptfed.shared.service.addresses import is_loopback


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
        header = request.headers.get("authorization", "")
        if token is not None and not hmac.compare_digest(header.encode(), f"Bearer {token}".encode()):
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
                raise gone(request)
            return Prediction(**await asyncio.to_thread(predictor.predict, image))
    except NoPrompts as error:
        raise ApiProblem(503, "no-prompts", "No prompts yet", str(error), {"Retry-After": "5"}) from None
    except BadImage as error:
        raise ApiProblem(422, "bad-image", "Not an image", str(error)) from None
    except TooManyPixels as error:
        raise ApiProblem(413, "too-large", "Image too large", str(error)) from None
