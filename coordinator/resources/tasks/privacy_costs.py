"""What an update has cost its client's privacy budget, held against the public terms."""

from __future__ import annotations

from typing import Any

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.database import Database
from promptfed.shared.api.report_schemas import SpentPrivacy
from promptfed.shared.messages import SpendReport
from promptfed.shared.privacy.accounting import (
    COARSE,
    PrivacyError,
    check_delta,
    epsilon_of,
    replace_one_epsilon,
    training_event,
)

TOLERANCE = 0.01  # by which another version's accountant may come to less


def spent_by(
    database: Database, federation: Federation, client: Client, spent: SpendReport | None
) -> dict[str, Any] | None:
    """The privacy cost of an update as it is stored: its event, and `SpentPrivacy` with it; None of an unprotected one.

    What the client says must match the public terms. Its ledger cannot have spent less than this update alone costs.
    """
    privacy = federation.privacy
    at_client = privacy is not None and privacy.protects_records
    if not at_client and spent is None:
        return None
    if privacy is None or not at_client:
        whose = "is not protected" if privacy is None else "is protected by the coordinator's noise"
        raise problems.PrivacyMismatch(f"{federation.name} {whose}, and the update says what it cost")
    if spent is None:
        text = f"{federation.name} is protected at level {privacy.level}, and the update does not say what it cost"
        raise problems.PrivacyMissing(f"{text}: install a version of promptfed that protects")
    training, events = federation.spec.training, [event.model_dump() for event in spent.events]
    planned = client.protection
    z = privacy.noise_multiplier or (planned.noise_multiplier if planned is not None else events[0]["z"])
    units = client.num_samples if client.units is None else client.units
    try:
        event = training_event(units, training.batch_size, training.epochs, z)
        check_delta(spent.delta, units)
    except PrivacyError as error:
        raise problems.PrivacyMismatch(str(error)) from None
    if events != [event.as_json()]:
        units_name = "samples" if privacy.unit == "record" else "groups"
        text = f"the update was trained with {events}; {units} {units_name} give {event.as_json()}"
        raise problems.PrivacyMismatch(text)
    if privacy.delta is not None and spent.delta > privacy.delta:
        raise problems.PrivacyMismatch(f"δ = {spent.delta:g} is larger than the federation allows ({privacy.delta:g})")
    alone = epsilon_of([event], spent.delta, COARSE)
    if spent.epsilon < alone * (1 - TOLERANCE):
        text = f"the ledger is said to stand at ε = {spent.epsilon:g}, and this update alone costs {alone:.4g}"
        raise problems.PrivacyMismatch(f"{text} at δ = {spent.delta:g}")
    with database.read() as session:
        every = [event, *queries.spent_events(session, federation.id, client.name)]
    about = SpentPrivacy(
        epsilon=epsilon_of(every, spent.delta, COARSE),
        epsilon_replace_one=replace_one_epsilon(every, spent.delta, COARSE),
        delta=spent.delta,
        noise_multiplier=z,
        noise=spent.noise,
        ledger_epsilon=spent.epsilon,
        ledger_epsilon_replace_one=spent.epsilon_replace_one,
    )
    return {"event": event.as_json(), **about.model_dump()}
