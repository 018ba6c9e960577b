"""``/healthz``, ``/readyz``, ``/metrics``: for monitoring."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator.api.deps import RegistryOf, documented
from promptfed.coordinator.problems import NotReady
from promptfed.coordinator.store.database import DatabaseAway
from promptfed.shared.api.api_schemas import Health

router = APIRouter(tags=["health"])


@router.get("/healthz", responses=documented())
async def healthz() -> Health:
    """The process is alive."""
    return Health(status="ok")


@router.get("/readyz", responses=documented(NotReady))
def readyz(registry: RegistryOf) -> Health:
    """Ready: the store can be read and written, and the engine runs."""
    if registry.away:
        raise NotReady("the database is away")
    try:
        readable = registry.database.answers()
    except (SQLAlchemyError, DatabaseAway):
        readable = False
    if not (readable and registry.ready):
        raise NotReady("the store cannot be read, or the engine is stopping")
    if (why := registry.writable.why_not()) is not None:
        raise NotReady(why)
    return Health(status="ok")


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {}}, "description": "Prometheus, without the names of clients"},
        **documented(),
    },
)
async def metrics(registry: RegistryOf) -> Response:
    """Prometheus metrics."""
    return Response(registry.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
