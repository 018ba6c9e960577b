"""What protecting whole clients has cost a federation, and how much its noise leaves."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.store.tables import PhaseRow, StateRow
from promptfed.shared.api_schemas import CentralPrivacyView
from promptfed.shared.methods.core.base import MethodError
from promptfed.shared.methods.core.client_checks import drowned, noised_phases, spent
from promptfed.shared.privacy.client_level import Drowned


def central_privacy(session: Session, federation: Federation) -> CentralPrivacyView | None:
    """None where no noise is for whole clients."""
    given, rules = federation.spec.privacy, federation.rules
    if not given.protects_clients or federation.absent is not None:
        return None
    clients = max(len(federation.run.trainers()), rules.min_clients)
    found = _drowned(federation, clients)
    phases = noised_phases(federation.method, rules.last_round, rules.rounds)
    return CentralPrivacyView.model_validate(
        {
            "epsilon": _epsilon(session, federation),
            "epsilon_planned": spent(federation.spec, phases),
            "delta": given.delta,
            "clip": given.clip,
            "noise_multiplier": given.noise_multiplier,
            "sampling": federation.spec.participation.sampling,
            "budget_rounds": rules.budget_rounds,
            "clients": clients,
            "ratio": found.ratio if found is not None else None,
            "after_rounds": found.after_rounds if found is not None else None,
            "warnings": [found.told()] if found is not None and found.ratio > 1 else [],
        }
    )


def _epsilon(session: Session, federation: Federation) -> float:
    """As it was recorded with the last noised state."""
    mine = (StateRow.federation_id == federation.id, StateRow.phase_id.is_not(None))
    query = select(PhaseRow.measured).join(StateRow, StateRow.phase_id == PhaseRow.id).where(*mine)
    measured = session.scalar(query.order_by(StateRow.id.desc()).limit(1))
    return float(measured["privacy"]["epsilon"]) if measured is not None else 0.0


def _drowned(federation: Federation, clients: int) -> Drowned | None:
    if federation.shape is None:
        return None
    try:
        return drowned(federation.method, federation.spec, federation.context(), clients)
    except MethodError:
        return None
