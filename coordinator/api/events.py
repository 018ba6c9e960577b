"""``.../events``: server-sent events from a durable table. For operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy import select

from promptfed.coordinator.api import deps
from promptfed.coordinator.api.deps import Informed, IsViewer, RegistryOf
from promptfed.coordinator.engine.registry import EVENTS, Registry, wait
from promptfed.coordinator.store.database import DatabaseAway
from promptfed.coordinator.store.tables import EventRow
from promptfed.shared.messages import ENDED

router = APIRouter(prefix="/v1/federations/{federation}", tags=["results"])

BATCH = 500
LOOK_AGAIN_SECONDS = 60.0
AWAY_SECONDS = 1.0


@router.get("/events", response_class=EventSourceResponse, responses=deps.for_callers())
async def get_events(
    registry: RegistryOf,
    federation: Informed,
    viewer: IsViewer,
    last_event_id: Annotated[int | None, Header(ge=0, le=1 << 62, description="go on after this event")] = None,
    newest: Annotated[int, Query(ge=1, le=BATCH, description="begin with so many events; default: all")] | None = None,
) -> AsyncIterator[ServerSentEvent]:
    """All events so far (after Last-Event-ID, or only the ``newest``), then each new one.

    The stream ends after the federation's last event, or when the caller's token expires or is revoked.
    """
    last = 0 if last_event_id is None and newest is None else last_event_id
    registry.metrics.streams.inc()
    try:
        while not registry.wakeups.closed:
            wakeup = registry.wakeups.listen((federation.id, EVENTS))
            left = viewer.seconds_left(registry)
            if left <= 0:
                return
            now = registry.federations.get(federation.id)
            try:
                rows = await asyncio.to_thread(_after, registry, federation.id, last, newest)
            except DatabaseAway:
                await wait(wakeup, min(AWAY_SECONDS, left))
                continue
            for row in rows:
                last = row.id
                yield ServerSentEvent(id=str(row.id), event=row.kind, data={**row.data, "at": row.at})
            if rows:
                continue
            if now is None or now.run.state in ENDED:
                return
            await wait(wakeup, min(LOOK_AGAIN_SECONDS, left))
    finally:
        registry.metrics.streams.dec()


def _after(registry: Registry, id: str, last: int | None, newest: int | None) -> list[EventRow]:
    """The next events after ``last``; None: the ``newest`` ones."""
    mine = select(EventRow).where(EventRow.federation_id == id)
    if last is None:
        query = mine.order_by(EventRow.id.desc()).limit(newest)
    else:
        query = mine.where(EventRow.id > last).order_by(EventRow.id).limit(BATCH)
    with registry.database.read() as session:
        rows = sorted(session.scalars(query), key=lambda row: row.id)
        session.expunge_all()
        return rows
