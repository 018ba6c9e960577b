"""Federations and clients as operators see them."""

from __future__ import annotations

import hashlib
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.jobs import selection_view
from promptfed.coordinator.reports.privacy import central_privacy
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import ClientRow, FederationRow
from promptfed.shared.api import api_schemas as schemas
from promptfed.shared.messages import ENDED


def federation_view(session: Session, federation: Federation) -> schemas.FederationView:
    """One federation: its state in memory, with its times and its newest state hash from the database."""
    columns = (FederationRow.created_at, FederationRow.started_at, FederationRow.ended_at)
    row = session.execute(select(*columns).where(FederationRow.id == federation.id)).one()
    times = {name: _time(at) if federation.unreadable else at for name, at in row._mapping.items()}
    run, stage = federation.run, federation.run.stage
    newest = queries.last_state(session, federation.id)
    awaited = stage.having("open") if stage is not None and not stage.closed else []
    return schemas.FederationView.model_validate(
        {
            "id": federation.id,
            "name": federation.name,
            "state": run.state,
            "unreadable": federation.absent,
            "reason": run.reason,
            "round": run.round,
            "phase": federation.phase,
            "spec": federation.spec,
            **times,
            "backbone": schemas.BackboneView(
                fingerprint=federation.fingerprint, shape=federation.shape, confirmed=times["started_at"] is not None
            ),
            "class_names": federation.class_names,
            "class_differences": federation.class_differences if run.state == "enrolling" else None,
            "draw": _draw(federation),
            "clients": _counts(federation),
            "stage": _stage(federation),
            "asked": sorted(stage.asks) if stage else [],
            "answered": stage.having("answered") if stage else [],
            "failed": stage.having("failed") if stage else [],
            "awaited": [
                schemas.Awaited.model_validate({"name": name, "until": federation.deadline}) for name in awaited
            ],
            "state_hash": newest.state_hash if newest is not None else None,
            "privacy": central_privacy(session, federation),
            "selection": selection_view(session, federation),
        }
    )


def _time(stored: object) -> datetime | None:
    """A stored time; None where it is damaged."""
    try:
        return clock.parse(str(stored))
    except ValueError:
        return None


def without_participation(view: schemas.FederationView) -> schemas.FederationView:
    """``view`` without anything that tells who takes part in the open phase, how many, or when they answer."""
    told: dict[str, object] = {"disk": None, "stage": None, "asked": [], "answered": [], "failed": [], "awaited": []}
    return view.model_copy(update=told)


def _draw(federation: Federation) -> schemas.DrawView:
    secret = federation.draw_secret
    if secret is None:
        return schemas.DrawView(commitment=None, secret=None)
    told = secret if federation.run.state in ENDED else None
    return schemas.DrawView(commitment=hashlib.sha256(secret.encode()).hexdigest(), secret=told)


def _counts(federation: Federation) -> schemas.ClientCounts:
    members = federation.run.members.values()
    return schemas.ClientCounts(
        trainers=sum(member.active and member.role == "trainer" for member in members),
        evaluators=sum(member.active and member.role == "evaluator" for member in members),
        withdrawn=sum(not member.active for member in members),
    )


def _stage(federation: Federation) -> schemas.StageView | None:
    stage = federation.run.stage
    if stage is None:
        return None
    counting = federation.run.state == "running" and not stage.closed
    return schemas.StageView.model_validate(
        {
            "kind": stage.kind,
            "round": federation.run.round,
            "phase": stage.name,
            "deadline": federation.deadline,
            "seconds_left": max(0.0, stage.deadline - clock.monotonic()) if counting else None,
            "sample_size": stage.sample_size,
            "extended": stage.extended,
            "closing": stage.closed,
        }
    )


def client_view(row: ClientRow) -> schemas.ClientView:
    """One client, without its secret's digest and its class names."""
    computed = {
        "client_id": row.id,
        "status": "active" if row.active else "withdrawn",
        "reset": row.secret_digest is None,
        "num_classes": len(row.class_names),
        "release": (row.software or {}).get("release"),
        "system": (row.software or {}).get("system"),
        "last_refusal": schemas.LastRefusal.model_validate(row.last_refusal) if row.last_refusal else None,
    }
    stored = {name: getattr(row, name) for name in schemas.ClientView.model_fields if name not in computed}
    return schemas.ClientView.model_validate(stored | computed)
