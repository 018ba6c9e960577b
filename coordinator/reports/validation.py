"""The report of a federation in which sites have validated an export."""

from __future__ import annotations

from sqlalchemy.orm import Session

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.reports.rounds import round_report, state_of
from promptfed.shared.api.export_card import FederationName
from promptfed.shared.api.validation_report import ValidationReport
from promptfed.shared.metrics.pooling import pooled_sites


def validation_report(session: Session, federation: Federation) -> ValidationReport:
    """What the sites have told so far, in order of name. Raises NoValidation."""
    if not federation.spec.validates:
        raise problems.NoValidation(f"{federation.name} trains: only a federation of kind validation has this report")
    if federation.run.state == "enrolling":
        raise problems.NoValidation(f"{federation.name} has not started: no site has been asked yet")
    evaluation = round_report(session, federation, 0).evaluation
    told = {} if evaluation is None else {name: client.figures for name, client in evaluation.clients.items()}
    sites = dict(sorted(told.items()))
    return ValidationReport(
        federation=FederationName(name=federation.name, id=federation.id, state=federation.run.state),
        export=federation.spec.origin,
        state=state_of(session, federation, 0).state_hash,
        method=federation.spec.method,
        backbone=federation.fingerprint,
        class_names=federation.spec.class_names,
        sites=sites,
        figures=pooled_sites({site: figures for site, figures in sites.items() if figures is not None}),
    )
