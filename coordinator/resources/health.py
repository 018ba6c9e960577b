"""Health and metrics, for everyone."""

from __future__ import annotations

from fastapi import Response

from promptfed.coordinator.http import openapi
from promptfed.coordinator.http.deps import RegistryOf
from promptfed.coordinator.http.openapi import documented
from promptfed.coordinator.problems import NotReady
from promptfed.shared.api.api_schemas import Health

router = openapi.router()


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
