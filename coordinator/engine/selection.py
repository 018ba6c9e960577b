"""The round that a federation's selection chooses, by the accuracies that are stored."""

from __future__ import annotations

from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.domain.run_state import EVALUATION
from promptfed.coordinator.store.queries import means_by_round
from promptfed.shared.api.api_schemas import SelectionView
from promptfed.shared.spec.sections import best, without_rise


def selection_view(session: Session, federation: Federation) -> SelectionView | None:
    """The best round so far; None without selection, or before a client has told of its held-out images."""
    selection = federation.spec.selection
    if selection is None:
        return None
    means = means_by_round(session, federation.id, EVALUATION, selection)
    round = best(means)
    if round is None:
        return None
    return SelectionView(round=round, value=means[round], compared=len(means), **selection.model_dump())


def rises_no_more(session: Session, federation: Federation) -> bool:
    """Whether as many evaluations as ``stop`` waits for came after the best one."""
    stop, selection = federation.spec.stop, federation.spec.selection
    if stop is None or selection is None:
        return False
    by_metric = selection.model_copy(update={"metric": stop.metric})
    return without_rise(means_by_round(session, federation.id, EVALUATION, by_metric)) >= stop.patience


def selected_round(session: Session, federation: Federation) -> int:
    """The chosen round; the last one where no client has told of its held-out images."""
    view = selection_view(session, federation)
    return federation.run.round if view is None else view.round
