"""Differential privacy of a federation: planned and spent ε, refusals, and the cost of the coordinator's noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from sqlalchemy import func, select, tuple_
from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine.private_jobs import released
from promptfed.coordinator.store.tables import EvaluationRow, ExchangeRow, PhaseRow, SumRow, TaskRow, UpdateRow
from promptfed.shared.api import report_schemas
from promptfed.shared.api.api_schemas import CentralPrivacyView
from promptfed.shared.api.privacy_schemas import FAILURES, ClientPrivacy, PrivacyView, SpendList, SpendView
from promptfed.shared.messages import PayloadReceipt, PrivacyEvent, SpendReport, Witness, Witnesses
from promptfed.shared.methods.core.checks.client_checks import costs, drowned, noised_phases
from promptfed.shared.methods.core.interface.base import MethodError
from promptfed.shared.privacy.accounting import ACCOUNTANT, RELATION, training_event
from promptfed.shared.privacy.client_level import Drowned

MOST_RECEIPTS = 256  # that one client is shown: more witnesses than any policy asks for


def spends_of(session: Session, federation: Federation, client: Client) -> SpendList:
    """The privacy cost that one client has reported, in order of its reports."""
    spends = _spends(session, federation, client.name).get(client.name, [])
    return SpendList(federation_id=federation.id, client=client.name, spends=spends)


def _spends(session: Session, federation: Federation, client: str | None = None) -> dict[str, list[SpendView]]:
    """By client: of all clients, or of one."""
    spends: dict[str, list[SpendView]] = {}
    for name, spend in (*_of_updates(session, federation, client), *_of_evaluations(session, federation, client)):
        spends.setdefault(name, []).append(spend)
    return {name: sorted(own, key=lambda spend: (spend.at, spend.round, spend.phase)) for name, own in spends.items()}


def _of_updates(session: Session, federation: Federation, client: str | None) -> Iterator[tuple[str, SpendView]]:
    """Updates, and masked vectors, whose changes are not known."""
    plain = (UpdateRow.sha256.label("sent"), UpdateRow.metrics, UpdateRow.received_at)
    masked = (ExchangeRow.digest.label("sent"), ExchangeRow.metrics, ExchangeRow.received_at)
    for table, columns in ((UpdateRow, plain), (ExchangeRow, masked)):
        for row in _answers(session, federation, client, table, *columns):
            spent = spent_privacy(row.metrics or {})
            if spent is not None:
                release = row.sent.removeprefix("sha256:") if table is UpdateRow else None
                event = _event(federation, federation.clients[row.client], row.metrics)
                yield row.client, _spend(row, spent, [event], release, split="train")


def last_spent(session: Session, federation: Federation, round: int) -> dict[str, report_schemas.SpentPrivacy]:
    """By client: the privacy cost with its last update, or masked vector, up to ``round``."""
    spent: dict[str, report_schemas.SpentPrivacy] = {}
    for table in (UpdateRow, ExchangeRow):
        told = select(TaskRow.client, func.max(TaskRow.phase_id)).join(table, table.task_id == TaskRow.id)
        told = told.join(PhaseRow, PhaseRow.id == TaskRow.phase_id).where(table.metrics.is_not(None))
        last = told.where(PhaseRow.federation_id == federation.id, PhaseRow.round <= round).group_by(TaskRow.client)
        metrics = select(TaskRow.client, table.metrics).join(table, table.task_id == TaskRow.id)
        for client, numbers in session.execute(metrics.where(tuple_(TaskRow.client, TaskRow.phase_id).in_(last))):
            cost = spent_privacy(numbers)
            if cost is not None:
                spent[client] = cost
    return spent


def _event(federation: Federation, client: Client, metrics: dict[str, Any]) -> PrivacyEvent:
    z, training = metrics["privacy_z"], federation.spec.training
    if "privacy_q" in metrics:
        q, count = metrics["privacy_q"], round(metrics["privacy_count"])
        return PrivacyEvent(mechanism="gaussian", q=q, z=z, count=count)
    event = training_event(client.num_samples, training.batch_size, training.epochs, z)  # stored before it was kept
    return PrivacyEvent.model_validate(event.as_json())


def _of_evaluations(session: Session, federation: Federation, client: str | None) -> Iterator[tuple[str, SpendView]]:
    """Evaluations with noisy counts, which report their privacy cost."""
    columns = (EvaluationRow.body, EvaluationRow.received_at)
    for row in _answers(session, federation, client, EvaluationRow, *columns):
        if row.body.get("privacy") is not None:
            spent = SpendReport.model_validate(row.body["privacy"])
            yield row.client, _spend(row, spent, spent.events, None, split="test")


def _spend(
    row: Any,
    spent: report_schemas.SpentPrivacy | SpendReport,
    events: list[PrivacyEvent],
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
        epsilon=spent.epsilon,
        epsilon_replace_one=spent.epsilon_replace_one if split == "train" else None,
        delta=spent.delta,
        noise=spent.noise,
        at=row.received_at,
    )


def _answers(session: Session, federation: Federation, client: str | None, table: Any, *columns: Any) -> Iterator[Any]:
    query = (
        select(TaskRow.id, TaskRow.client, PhaseRow.round, PhaseRow.name, *columns)
        .join(PhaseRow, PhaseRow.id == TaskRow.phase_id)
        .join(table, table.task_id == TaskRow.id)
        .where(TaskRow.federation_id == federation.id)
        .order_by(table.received_at)
    )
    yield from session.execute(query if client is None else query.where(TaskRow.client == client))


def privacy_view(session: Session, federation: Federation) -> PrivacyView:
    """The figures of all clients together, with warnings for the operator."""
    given = federation.spec.privacy
    trainers = [client for _, client in sorted(federation.clients.items()) if client.role == "trainer"]
    protected = given.level == "sample"
    spent = _spends(session, federation) if protected else {}
    clients = [_of_client(client, spent.get(client.name, [])) for client in trainers] if protected else []
    tasks = select(TaskRow.failure).where(TaskRow.federation_id == federation.id, TaskRow.failure.is_not(None))
    kinds = Counter(failure["type"] for failure in session.scalars(tasks))
    sums = (
        select(func.min(SumRow.count))
        .join(PhaseRow, PhaseRow.id == SumRow.phase_id)
        .where(PhaseRow.federation_id == federation.id)
    )
    return PrivacyView(
        level=given.level,
        unit=given.unit if protected else None,
        relation=RELATION,
        accountant=ACCOUNTANT,
        clip=given.clip,
        noise_multiplier=given.noise_multiplier,
        epsilon=given.epsilon,
        delta=given.delta,
        evaluation=given.evaluations if given.level != "none" else None,
        withheld=_withheld(session, federation),
        clients=clients,
        smallest_sum=session.scalar(sums),
        failures={kind: count for kind, count in sorted(kinds.items()) if kind in FAILURES},
        warnings=_warnings(federation, clients),
    )


def _of_client(client: Client, everything: list[SpendView]) -> ClientPrivacy:
    spends = [spend for spend in everything if spend.split == "train"]
    last = spends[-1] if spends else None
    return ClientPrivacy(
        client=client.name,
        planned=client.protection,
        releases=len(spends),
        round=last.round if last is not None else None,
        epsilon=last.epsilon if last is not None else None,
        epsilon_replace_one=last.epsilon_replace_one if last is not None else None,
        delta=last.delta if last is not None else None,
        noise_multiplier=last.events[0].z if last is not None else None,
        noise=last.noise if last is not None else None,
        spent=[spend.epsilon for spend in spends],
    )


def _withheld(session: Session, federation: Federation) -> int:
    query = (
        select(func.count())
        .select_from(EvaluationRow)
        .join(TaskRow, TaskRow.id == EvaluationRow.task_id)
        .where(TaskRow.federation_id == federation.id, EvaluationRow.body["withheld"].as_boolean())
    )
    return session.scalar(query) or 0


def _warnings(federation: Federation, clients: list[ClientPrivacy]) -> list[str]:
    warnings = []
    if federation.privacy is None and federation.spec.secure_aggregation is None:
        warnings.append("nothing is protected: whoever has the prompts or an update can test for a training image")
    seeded = [client.client for client in clients if client.noise == "seeded"]
    if seeded:
        warnings.append(f"noise of a seed, which protects nothing: {', '.join(seeded)}")
    silent = [client.client for client in clients if client.planned is None]
    if silent:
        warnings.append(f"have not said how they train, by an older version: {', '.join(silent)}")
    over = [
        client.client
        for client in clients
        if client.planned and client.epsilon and client.epsilon > client.planned.epsilon_planned * 1.01
    ]
    if over:
        text = "ε of the ledger is over what this federation was to cost: other federations share it"
        warnings.append(f"{text}: {', '.join(over)}")
    return warnings


def witnesses(session: Session, federation: Federation, round: int, phase: str) -> Witnesses:
    """Receipts that the counted clients of a closed phase have signed; none if the phase is open or does not exist.

    There are none with Poisson sampling: samples are secret, and receipts would tell their size.
    """
    receipts: list[Witness] = []
    if federation.spec.participation.model_dump().get("sampling", "fixed") == "fixed":
        query = (
            select(UpdateRow.receipt, TaskRow.payload_sha256)
            .join(TaskRow, TaskRow.id == UpdateRow.task_id)
            .join(PhaseRow, PhaseRow.id == TaskRow.phase_id)
            .where(PhaseRow.federation_id == federation.id, PhaseRow.round == round, PhaseRow.name == phase)
            .where(TaskRow.counted, UpdateRow.receipt.is_not(None))
            .order_by(TaskRow.client)
            .limit(MOST_RECEIPTS)
        )
        for receipt, payload in session.execute(query):
            signed = PayloadReceipt.model_validate(receipt)
            receipts.append(Witness(**signed.model_dump(), payload_sha256=payload))
    return Witnesses(round=round, phase=phase, receipts=receipts)


def spent_privacy(metrics: Mapping[str, float]) -> report_schemas.SpentPrivacy | None:
    """The privacy cost of an update, which is stored among its metrics; None if it was not protected."""
    if "privacy_epsilon" not in metrics:
        return None
    noise: Literal["secret", "seeded"] = "seeded" if metrics["privacy_seeded"] else "secret"
    return report_schemas.SpentPrivacy(
        epsilon=metrics["privacy_epsilon"],
        epsilon_replace_one=metrics.get("privacy_replace_one"),
        delta=metrics["privacy_delta"],
        noise_multiplier=metrics["privacy_z"],
        noise=noise,
    )


def central_privacy(session: Session, federation: Federation) -> CentralPrivacyView | None:
    """Privacy cost at level ``client``, and how the noise compares with the change; None at other levels."""
    given, rules = federation.spec.privacy, federation.rules
    if not given.protects_clients or federation.absent is not None:
        return None
    clients = max(len(federation.run.trainers()), rules.min_clients)
    noise = _drowned(federation, clients)
    planned = costs(federation.spec, noised_phases(federation.method, rules.last_round, rules.rounds))
    return CentralPrivacyView.model_validate(
        {
            **costs(federation.spec, released(session, federation)),
            **{name.replace("epsilon", "epsilon_planned"): value for name, value in planned.items()},
            "delta": given.delta,
            "clip": given.clip,
            "noise_multiplier": given.noise_multiplier,
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
