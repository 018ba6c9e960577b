"""The coordinator as an ASGI application."""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from starlette.exceptions import HTTPException

from coordinator import access, bootstrap, federations
from coordinator.api import clients, events, health, methods, results, tasks
from coordinator.api import federations as federations_api
from coordinator.engine import Engine
from coordinator.lock import FolderLock
from coordinator.measures import Measures
from coordinator.problems import (
    ANY_REQUEST,
    BodyTooLarge,
    HttpError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Refusal,
    StorageFull,
    UnreadableBody,
    documented,
)
from coordinator.settings import Settings
from coordinator.store.blobs import Blobs
from coordinator.store.database import Database
from coordinator.uploads import Uploads

log = logging.getLogger("promptfed.coordinator")

JSON_BYTES = 8 << 20
ROUTERS = (methods, federations_api, clients, tasks, results, events, health)


def create_app(settings: Settings) -> FastAPI:
    """The application; its lifespan opens the data folder, takes up all federations, and lets go of them."""
    app = FastAPI(
        title="promptfed coordinator",
        version="1",
        summary="Federated prompt learning: rounds, tasks and updates as resources",
        lifespan=_lifespan,
        responses=documented(*ANY_REQUEST),
        max_body_size=JSON_BYTES,
        separate_input_output_schemas=False,
    )
    app.state.settings = settings
    for module in ROUTERS:
        app.include_router(module.router)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(OSError, _store_failed)
    app.add_exception_handler(SQLAlchemyError, _store_failed)
    app.add_exception_handler(Exception, _broken)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    lock = FolderLock(settings.data_dir)
    engine = await asyncio.to_thread(_open, settings, lock)
    app.state.engine = engine
    app.state.operator_digest = access.digest(access.operator_token(settings.data_dir))
    app.state.uploads = Uploads(engine, settings.max_uploads, settings.upload_timeout_seconds)
    try:
        await engine.start()
        await asyncio.to_thread(bootstrap.bootstrap, engine, settings)
        yield
    finally:
        await engine.stop()
        engine.database.close()
        lock.release()


def _open(settings: Settings, lock: FolderLock) -> Engine:
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock.acquire()
    blobs = Blobs(settings.data_dir)
    blobs.open()
    database = Database(settings.data_dir / "coordinator.sqlite3")
    database.migrate()
    return Engine(database, blobs, Measures())


async def _answer(request: Request, refusal: Refusal) -> JSONResponse:
    engine: Engine = request.app.state.engine
    engine.measures.refusals.labels(refusal.kind).inc()
    client = getattr(request.state, "client", None)
    if client is not None and refusal.status < 500:
        id, name = client
        await asyncio.to_thread(federations.record_refusal, engine, id, name, refusal, request.url.path)
    return refusal.response(request.url.path)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return await _answer(request, error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [
        {"path": ".".join(str(part) for part in item["loc"]), "detail": item["msg"].removeprefix("Value error, ")}
        for item in error.errors()
    ]
    text = "; ".join(f"{one['path']}: {one['detail']}" for one in errors[:5])
    return await _answer(request, InvalidRequest(text, errors=errors))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kinds: dict[int, Refusal] = {
        400: UnreadableBody(str(error.detail)),
        404: NotFound(f"there is nothing at {request.url.path}"),
        405: MethodNotAllowed(f"{request.url.path} does not know {request.method}", headers=dict(error.headers or {})),
        413: BodyTooLarge("the body is too large for this call"),
    }
    return await _answer(request, kinds.get(error.status_code) or HttpError(error.status_code, str(error.detail)))


async def _store_failed(request: Request, error: Exception) -> JSONResponse:
    log.error("the store failed", exc_info=error)
    if _is_full(error):
        return await _answer(request, StorageFull("the disk is full, nothing was stored: make room and send it again"))
    return await _answer(request, InternalError("the coordinator's store failed; its log says why"))


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    cause = error.orig if isinstance(error, OperationalError) else None
    return isinstance(cause, sqlite3.OperationalError) and cause.sqlite_errorcode == sqlite3.SQLITE_FULL


async def _broken(request: Request, error: Exception) -> JSONResponse:
    return await _answer(request, InternalError("something broke; the coordinator's log says what"))
