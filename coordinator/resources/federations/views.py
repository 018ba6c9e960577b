"""Federations and clients as operators see them, and what privacy costs: planned and spent ε, refusals, noise."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel
from sqlalchemy import Text, cast, func, select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine import log_lines
from promptfed.coordinator.engine.readable import Reading, leniently
from promptfed.coordinator.engine.selection import selection_view
from promptfed.coordinator.engine.sums import released
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import (
    EvaluationRow,
    ExchangeRow,
    FederationRow,
    PhaseRow,
    SumRow,
    TaskRow,
    UpdateRow,
)
from promptfed.shared.api import api_schemas as schemas
from promptfed.shared.api.api_schemas import (
    FAILURES,
    CentralPrivacyView,
    ClientPrivacy,
    PrivacyView,
    SpendList,
    SpendView,
)
from promptfed.shared.api.report_schemas import SpentPrivacy
from promptfed.shared.messages import ENDED, PrivacyEvent, SpendReport
from promptfed.shared.methods.core.costs import costs, drowned, noised_phases
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.privacy.accounting import Drowned

log = logging.getLogger("promptfed.coordinator")
Reported = tuple[Any, SpentPrivacy]
"""An answer's row, and what it cost."""


def federation_view(session: Session, federation: Federation) -> schemas.FederationView:
    """One federation: its state in memory, with its times and its newest state hash from the database."""
    columns = (FederationRow.created_at, FederationRow.started_at, FederationRow.ended_at)
    row = session.execute(select(*columns).where(FederationRow.id == federation.id)).one()
    times = {name: _time(at) for name, at in row._mapping.items()}
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
    hidden: dict[str, object] = {"stage": None, "asked": [], "answered": [], "failed": [], "awaited": []}
    return view.model_copy(update=hidden)


def _draw(federation: Federation) -> schemas.DrawView:
    secret = federation.draw_secret
    if secret is None:
        return schemas.DrawView(commitment=None, secret=None)
    revealed = secret if federation.run.state in ENDED else None
    return schemas.DrawView(commitment=hashlib.sha256(secret.encode()).hexdigest(), secret=revealed)


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


def spends_of(session: Session, federation: Federation, client: Client) -> SpendList:
    """The privacy cost that one client has reported, in order of its reports, by its own word."""
    reading = Reading()
    of_updates = _of_updates(session, federation, client, reading)
    spends = [*of_updates, *_of_evaluations(session, federation, client, reading)]
    for text in reading.unreadable:
        log.warning("a spend of %s is not told: %s", client.name, text, extra=log_lines.where(federation))
    spends.sort(key=lambda spend: (spend.at, spend.round, spend.phase))
    return SpendList(federation_id=federation.id, client=client.name, spends=spends)


def _reported(session: Session, federation: Federation, reading: Reading, *where: Any) -> Iterator[Reported]:
    """The updates that report their privacy cost, in order of their phases; or masked vectors."""
    table: type[UpdateRow | ExchangeRow] = UpdateRow
    sent = UpdateRow.sha256
    if federation.spec.secure_aggregation is not None:
        table, sent = ExchangeRow, ExchangeRow.digest
    where = (*where, table.spent.is_not(None))
    for row in _answers(session, federation, table, sent.label("sent"), leniently(table.spent), where=where):
        spent = reading.row(f"the cost of {row.client} in round {row.round}", partial(spent_privacy, row.spent))
        if spent is not None:
            yield row, spent


def _of_updates(session: Session, federation: Federation, client: Client, reading: Reading) -> Iterator[SpendView]:
    """Updates, and masked vectors, whose changes are not known."""
    masked = federation.spec.secure_aggregation is not None
    for row, spent in _reported(session, federation, reading, TaskRow.client == client.name):
        event = reading.row("an event", partial(PrivacyEvent.model_validate, row.spent.get("event")))
        if event is not None:
            ledger = (spent.ledger_epsilon, spent.ledger_epsilon_replace_one)
            release = None if masked else row.sent.removeprefix("sha256:")
            yield _spend(row, [event], spent, ledger, release, split="train")


def _of_evaluations(session: Session, federation: Federation, client: Client, reading: Reading) -> Iterator[SpendView]:
    """Evaluations with noisy counts, which report their privacy cost."""
    mine = (TaskRow.client == client.name,)
    for row in _answers(session, federation, EvaluationRow, leniently(EvaluationRow.body), where=mine):
        evaluation = reading.row(f"the evaluation of round {row.round}", partial(_Costed.model_validate, row.body))
        if evaluation is not None and (spent := evaluation.privacy) is not None:
            yield _spend(row, spent.events, spent, (spent.epsilon, None), None, split="test")


class _Costed(BaseModel):
    """An evaluation's body, of which only the cost is asked for."""

    privacy: SpendReport | None = None


def _spend(
    row: Any,
    events: list[PrivacyEvent],
    spent: SpentPrivacy | SpendReport,
    ledger: tuple[float, float | None],
    release: str | None,
    split: Literal["train", "test"],
) -> SpendView:
    return SpendView(
        round=row.round,
        phase=row.name.partition("/")[0],
        task_id=row.id,
        split=split,
        release=release,
        events=events,
        epsilon=ledger[0],
        epsilon_replace_one=ledger[1],
        delta=spent.delta,
        noise=spent.noise,
        at=row.received_at,
    )


def _answers(
    session: Session, federation: Federation, table: Any, *columns: Any, where: Sequence[Any]
) -> Iterator[Any]:
    query = (
        select(TaskRow.id, TaskRow.client, PhaseRow.round, PhaseRow.name, table.received_at, *columns)
        .join(PhaseRow, PhaseRow.id == TaskRow.phase_id)
        .join(table, table.task_id == TaskRow.id)
        .where(TaskRow.federation_id == federation.id, *where)
        .order_by(PhaseRow.id)
    )
    yield from session.execute(query)


def privacy_view(session: Session, federation: Federation) -> PrivacyView:
    """The figures of all clients together, with warnings for the operator."""
    reading = Reading()
    clients = _of_clients(session, federation, reading) if federation.spec.privacy.protects_records else []
    failed = leniently(TaskRow.failure)
    tasks = select(failed).where(TaskRow.federation_id == federation.id, TaskRow.failure.is_not(None))
    types = (str(failure.get("type")) for failure in session.scalars(tasks) if isinstance(failure, dict))
    kinds = Counter(kind for kind in types if kind in FAILURES)
    sums = (
        select(func.min(SumRow.count))
        .join(PhaseRow, PhaseRow.id == SumRow.phase_id)
        .where(PhaseRow.federation_id == federation.id)
    )
    return PrivacyView(
        level=federation.spec.privacy.level,
        withheld=_withheld(session, federation),
        clients=clients,
        unreadable=reading.unreadable,
        smallest_sum=session.scalar(sums),
        failures=dict(sorted(kinds.items())),
        warnings=_warnings(federation, clients),
    )


def _of_clients(session: Session, federation: Federation, reading: Reading) -> list[ClientPrivacy]:
    """ε of all releases, and the other figures of each trainer's last one."""
    releases: dict[str, list[SpentPrivacy]] = {}
    for row, spent in _reported(session, federation, reading):
        releases.setdefault(row.client, []).append(spent)
    return [
        ClientPrivacy(
            client=name,
            planned=client.protection,
            spent=[spent.epsilon for spent in releases.get(name, [])],
            last=releases[name][-1] if name in releases else None,
        )
        for name, client in sorted(federation.clients.items())
        if client.role == "trainer"
    ]


def _withheld(session: Session, federation: Federation) -> int:
    # As text: where one body is damaged, SQLite refuses to look into any as JSON.
    body = cast(EvaluationRow.body, Text)
    joined = select(func.count()).select_from(EvaluationRow).join(TaskRow, TaskRow.id == EvaluationRow.task_id)
    return session.scalars(joined.where(TaskRow.federation_id == federation.id, body.like('%"withheld": true%'))).one()


def _warnings(federation: Federation, clients: list[ClientPrivacy]) -> list[str]:
    warnings = []
    if federation.privacy is None and federation.spec.secure_aggregation is None:
        warnings.append("nothing is protected: whoever has the prompts or an update can test for a training image")
    seeded = [client.client for client in clients if client.last is not None and client.last.noise == "seeded"]
    if seeded:
        warnings.append(f"noise from a seed, which protects nothing: {', '.join(seeded)}")
    silent = [client.client for client in clients if client.planned is None]
    if silent:
        warnings.append(f"an older version, which tells no plan of its training: {', '.join(silent)}")
    over = [
        client.client
        for client in clients
        if client.planned and client.last and client.last.ledger_epsilon > client.planned.epsilon_planned * 1.01
    ]
    if over:
        text = "ε of the ledger is over what this federation was to cost: other federations share it"
        warnings.append(f"{text}: {', '.join(over)}")
    return warnings


def spent_privacy(stored: Any) -> SpentPrivacy:
    """The privacy cost of an update, of its row's column ``spent``. Raises ValidationError."""
    return SpentPrivacy.model_validate(stored)


def central_privacy(session: Session, federation: Federation) -> CentralPrivacyView | None:
    """Privacy cost at level ``client``, and how the noise compares with the change; None at other levels."""
    privacy, rules = federation.spec.privacy, federation.rules
    if not privacy.protects_clients or federation.absent is not None:
        return None
    clients = max(len(federation.run.trainers()), rules.min_clients)
    noise = _drowned(federation, clients)
    planned = costs(federation.spec, noised_phases(federation.method, rules.last_round, rules.rounds))
    return CentralPrivacyView.model_validate(
        {
            **costs(federation.spec, released(session, federation)),
            **{name.replace("epsilon", "epsilon_planned"): value for name, value in planned.items()},
            "delta": privacy.delta,
            "clip": privacy.clip,
            "noise_multiplier": privacy.noise_multiplier,
            "sampling": federation.spec.participation.sampling,
            "budget_rounds": rules.budget_rounds,
            "clients": clients,
            "ratio": noise.ratio if noise is not None else None,
            "after_rounds": noise.after_rounds if noise is not None else None,
            "warnings": [noise.told()] if noise is not None and noise.ratio > 1 else [],
        }
    )


def _drowned(federation: Federation, clients: int) -> Drowned | None:
    if federation.shape is None:
        return None
    try:
        return drowned(federation.method, federation.spec, federation.context(), clients)
    except MethodError:
        return None
