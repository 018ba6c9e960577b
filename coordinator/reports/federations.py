"""Federations and clients as operators see them."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Live
from promptfed.coordinator.store.tables import ClientRow, FederationRow, StateRow
from promptfed.shared.api_schemas import (
    Awaited,
    BackboneView,
    ClientCounts,
    ClientView,
    FederationView,
    LastRefusal,
    StageView,
)


def federation_view(session: Session, live: Live) -> FederationView:
    """One federation, as it stands."""
    row = session.get_one(FederationRow, live.id)
    run, stage = live.run, live.run.stage
    newest = select(StateRow.state_hash).where(StateRow.federation_id == live.id).order_by(StateRow.id.desc()).limit(1)
    awaited = stage.having("open") if stage is not None and not stage.closed else []
    return FederationView.model_validate(
        {
            "id": live.id,
            "name": live.name,
            "state": run.state,
            "reason": run.reason,
            "round": run.round,
            "phase": live.phase,
            "spec": live.spec,
            "created_at": row.created_at,
            "started_at": row.started_at,
            "ended_at": row.ended_at,
            "backbone": BackboneView(
                fingerprint=live.fingerprint, shape=live.shape, confirmed=row.started_at is not None
            ),
            "clients": _counts(live),
            "stage": _stage(live),
            "asked": sorted(stage.asks) if stage else [],
            "answered": stage.having("answered") if stage else [],
            "failed": stage.having("failed") if stage else [],
            "awaited": [Awaited.model_validate({"name": name, "until": live.deadline}) for name in awaited],
            "state_hash": session.scalar(newest),
        }
    )


def _counts(live: Live) -> ClientCounts:
    members = live.run.members.values()
    return ClientCounts(
        trainers=sum(one.active and one.role == "trainer" for one in members),
        evaluators=sum(one.active and one.role == "evaluator" for one in members),
        withdrawn=sum(not one.active for one in members),
    )


def _stage(live: Live) -> StageView | None:
    stage = live.run.stage
    if stage is None:
        return None
    counting = live.run.state == "running" and not stage.closed
    return StageView.model_validate(
        {
            "kind": stage.kind,
            "round": live.run.round,
            "phase": stage.name,
            "deadline": live.deadline,
            "seconds_left": max(0.0, stage.deadline - clock.monotonic()) if counting else None,
            "sample_size": stage.sample_size,
            "extended": stage.extended,
            "closing": stage.closed,
        }
    )


def client_view(row: ClientRow) -> ClientView:
    """One client."""
    return ClientView.model_validate(
        {
            "client_id": row.id,
            "name": row.name,
            "role": row.role,
            "status": "active" if row.active else "withdrawn",
            "joined": row.joined,
            "reset": row.secret_digest is None,
            "num_samples": row.num_samples,
            "num_classes": len(row.class_names),
            "domain": row.domain,
            "device": row.device,
            "enrolled_at": row.enrolled_at,
            "last_seen": row.last_seen,
            "refusals": row.refusals,
            "last_refusal": LastRefusal.model_validate(row.last_refusal) if row.last_refusal else None,
        }
    )
