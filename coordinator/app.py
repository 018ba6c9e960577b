"""The coordinator as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from promptfed.coordinator import problems
from promptfed.coordinator.aggregation.global_state import NoTorch
from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.coordinator.engine.metrics import Metrics
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.engine.scheduler import Scheduler
from promptfed.coordinator.http.headers import PROTOCOL_HEADER, with_headers
from promptfed.coordinator.http.json_bodies import JsonBodies
from promptfed.coordinator.http.throttle import AuthThrottle
from promptfed.coordinator.http.uploads import Uploads
from promptfed.coordinator.http.waiting import InTurn
from promptfed.coordinator.resources import health, pages, public
from promptfed.coordinator.resources.clients import operations as clients
from promptfed.coordinator.resources.clients import routes as clients_routes
from promptfed.coordinator.resources.federations import operations as federations
from promptfed.coordinator.resources.federations import routes as federations_routes
from promptfed.coordinator.resources.operators import routes as operators_routes
from promptfed.coordinator.resources.results import routes as results_routes
from promptfed.coordinator.resources.tasks import routes as tasks_routes
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store import opening, tokens
from promptfed.coordinator.store.backend import DatabaseAway
from promptfed.coordinator.store.blobs import DamagedBlob
from promptfed.coordinator.store.bucket import ObjectStoreAway
from promptfed.coordinator.store.opening import Store, open_store
from promptfed.coordinator.store.signing import Signer
from promptfed.coordinator.store.turns import TRY_SECONDS
from promptfed.shared.messages import Problem
from promptfed.shared.privacy.noise import Noise
from promptfed.shared.service.reasons import offence
from promptfed.shared.versions import OtherVersion, expect_ours

log = logging.getLogger("promptfed.coordinator")

ROUTERS = (  # those first that each round calls
    tasks_routes.router,
    health.router,
    pages.router,
    public.router,
    federations_routes.router,
    clients_routes.router,
    results_routes.router,
    operators_routes.router,
)
LOOK_SECONDS = 0.25  # between two looks whether this coordinator's turn has ended
ANSWERED_AS_PROBLEMS: tuple[type[Exception], ...] = (
    problems.Refusal,
    RequestValidationError,
    HTTPException,
    OSError,
    SQLAlchemyError,
    DatabaseAway,
    NoTorch,
    DamagedBlob,
    Exception,
)


class Application(FastAPI):
    """The coordinator's application."""

    def __init__(self, settings: Settings, **options: Any):
        super().__init__(**options)
        self.state.settings = settings
        self.state.turn = None
        calls: ASGIApp = super().__call__
        self._calls = InTurn(calls) if settings.advertise_url is not None else calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        scope["app"] = self
        if scope["type"] == "http":
            # Around all of the framework's: what answers for a defect of ours stands outside of middleware added to it.
            send = with_headers(scope, send)
        version = next((value for name, value in scope.get("headers", ()) if name == PROTOCOL_HEADER), None)
        try:
            expect_ours(version and version.decode("latin-1"), "the client", "this coordinator")
        except OtherVersion as error:
            answer = await _answer(Request(scope), problems.ProtocolVersion(str(error)))
            await answer(scope, receive, send)
            return
        await self._calls(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """FastAPI's own description, with the form of refusals."""
        schema = super().openapi()
        schema["components"]["schemas"]["Problem"] = Problem.model_json_schema()
        return schema


def create_app(settings: Settings) -> Application:
    """The application; its lifespan opens the data folder, takes up all federations, and lets go of them."""
    app = Application(
        settings,
        title="promptfed coordinator",
        version="1",
        summary="Federated prompt learning: rounds, tasks and updates as resources",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page would load scripts from elsewhere: `resources/pages.py` has our own
        redoc_url=None,
        openapi_url=None,  # there too: it is made and written once
        separate_input_output_schemas=False,
    )
    app.add_middleware(JsonBodies, seconds=settings.upload_timeout_seconds)
    for router in ROUTERS:  # the routes themselves: `include_router` would make each anew for every application
        app.router.routes.extend(router.routes)
    pages.add_files_of_docs(app)
    for kind in ANSWERED_AS_PROBLEMS:
        app.add_exception_handler(kind, _answer)
    return app


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Drive the store's federations for the length of a block; servers enter it by themselves.

    The store is opened here unless it lies in ``app.state.store``; it is closed at the end. A simulation lays its
    seeded noise into ``app.state.noise``. One of several coordinators waits for its turns in the background; what ends
    that lies in ``app.state.failed``, a future.
    """
    settings: Settings = app.state.settings
    if settings.advertise_url is None:
        store: Store | None = getattr(app.state, "store", None)
        if store is None:
            store = await asyncio.to_thread(open_store, settings)
        async with _working(app, store):
            yield
        return
    waiting, stopping = await asyncio.to_thread(opening.Waiting, settings), asyncio.Event()
    app.state.failed = turns = asyncio.create_task(_take_turns(app, waiting, stopping), name="turns")
    try:
        yield
    finally:
        waiting.stop()
        stopping.set()
        await asyncio.gather(turns, return_exceptions=True)
        waiting.close()


async def _take_turns(app: FastAPI, waiting: opening.Waiting, stopping: asyncio.Event) -> None:
    """Work whenever no other coordinator does, until ``waiting`` is stopped. Raises CannotOpen, BadInput,
    OSError.
    """
    while not stopping.is_set():
        try:
            store = await asyncio.to_thread(waiting.next_store)
            if store is not None:
                await _take_turn(app, store, stopping)
        except (DatabaseAway, ObjectStoreAway, SQLAlchemyError) as error:
            log.warning("this coordinator could not take its turn: %s", error)
            await asyncio.sleep(TRY_SECONDS)


async def _take_turn(app: FastAPI, store: Store, stopping: asyncio.Event) -> None:
    turn = store.turn
    assert turn is not None
    async with _working(app, store):
        log.info("this coordinator works now")
        app.state.turn = turn
        while turn.works and not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), LOOK_SECONDS)
        if not stopping.is_set():
            log.warning("another coordinator may work now: this one drops what it has in memory, and waits")
            turn.end()


@asynccontextmanager
async def _working(app: FastAPI, store: Store) -> AsyncIterator[None]:
    """A block in which an opened store's federations are driven. The store is closed at the end."""
    settings: Settings = app.state.settings
    noise: Noise | None = getattr(app.state, "noise", None)
    registry = Registry(store.database, store.blobs, Metrics(), noise)
    scheduler = Scheduler(registry)
    try:
        app.state.registry = registry
        app.state.operator_digest = tokens.digest(_first_token(settings))
        app.state.signer = Signer(settings.data_dir, settings.signing_key_file)
        app.state.uploads = Uploads(
            registry, settings.max_uploads, settings.upload_timeout_seconds, settings.upload_wait_seconds
        )
        app.state.auth_throttle = AuthThrottle(settings.auth_failures_per_minute)
        await scheduler.start()
        await asyncio.to_thread(federations.bootstrap, registry, settings)
        yield
    finally:
        await scheduler.stop()
        store.close()


def _first_token(settings: Settings) -> str:
    file = settings.operator_token_file
    return tokens.given_operator_token(file) if file is not None else tokens.operator_token(settings.data_dir)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    """Answer what a request has raised as a problem."""
    refusal = _refusal_of(request, error)
    registry: Registry = request.app.state.registry
    registry.metrics.refused(refusal.kind, of_update=request.url.path.endswith("/update"))
    client: tuple[str, str] | None = getattr(request.state, "client", None)
    newcomer: tuple[str, str, str] | None = getattr(request.state, "newcomer", None)
    if refusal.status < 500:
        try:
            if client is not None:
                await clients.record_refusal(registry, client[0], client[1], refusal, request.url.path)
            elif newcomer is not None:
                record = clients.record_refused_enrolment
                await asyncio.to_thread(record, registry, *newcomer, refusal=refusal)
        except (SQLAlchemyError, DatabaseAway, OSError, RegistryClosed, problems.Refusal) as failure:
            log.warning("a refusal could not be written down: %s", type(failure).__name__)
    return refusal.response(request.url.path)


def _refusal_of(request: Request, error: Exception) -> problems.Refusal:
    registry: Registry = request.app.state.registry
    match error:
        case problems.Refusal():
            return error
        case RequestValidationError():
            return _invalid(error)
        case HTTPException(__cause__=problems.Refusal() as refusal):  # raised while the framework read a body
            return refusal
        case HTTPException():
            return _of_http(request, error)
        case DatabaseAway():
            return problems.StoreAway()
        case ObjectStoreAway():
            log.error("%s", error)
            return problems.ObjectsAway("the coordinator's object store is away: send it again later")
        case OSError() | SQLAlchemyError():
            log.error("the store failed", exc_info=error)
            if registry.database.is_full(error):
                return problems.StorageFull("the disk is full, nothing was stored: make room and send it again")
            return problems.InternalError("the coordinator's store failed; its log says why")
        case NoTorch():
            return problems.MethodAbsent(str(error))
        case DamagedBlob():
            log.error("%s", error)
            return problems.StorageDamaged("what is stored is damaged, and is not given out: put a backup back")
    return problems.InternalError("something broke; the coordinator's log says what")


def _invalid(error: RequestValidationError) -> problems.InvalidRequest:
    errors = [{"path": ".".join(str(part) for part in item["loc"]), "detail": _detail(item)} for item in error.errors()]
    text = "; ".join(f"{item['path']}: {item['detail']}" for item in errors[:5])
    return problems.InvalidRequest(text, errors=errors)


def _detail(item: dict[str, Any]) -> str:
    # A body is left as bytes where its Content-Type names no JSON; curl's `-d` alone sends a form's.
    if tuple(item["loc"]) == ("body",) and isinstance(item.get("input"), bytes):
        return "it is read as JSON under `Content-Type: application/json` only: send that header"
    return offence(item)


def _of_http(request: Request, error: HTTPException) -> problems.Refusal:
    path, detail = request.url.path, str(error.detail)
    match error.status_code:
        case 400:
            if isinstance(error.__cause__, RecursionError):
                return problems.UnreadableBody("the body's JSON is nested too deeply to be read")
            return problems.UnreadableBody(
                "the body is no UTF-8" if isinstance(error.__cause__, ValueError) else detail
            )
        case 404:
            return problems.NotFound(f"there is nothing at {path}")
        case 405:
            return problems.MethodNotAllowed(
                f"{path} does not know {request.method}", headers=dict(error.headers or {})
            )
        case 408:
            return problems.UploadTimeout(detail)
        case 413:
            return problems.BodyTooLarge("the body is too large for this call")
    return problems.HttpError(error.status_code, detail)
