"""What clients report about the privacy cost of their updates."""

from __future__ import annotations

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.shared.messages import SpendReport
from promptfed.shared.privacy.accounting import training_event


def spent_metrics(federation: Federation, client: Client, spent: SpendReport | None) -> dict[str, float]:
    """The privacy cost of an update that the client reports, as metrics. It must match the public terms."""
    privacy = federation.privacy
    at_client = privacy is not None and privacy.protects_records
    if not at_client and spent is None:
        return {}
    if privacy is None or not at_client:
        whose = "is not protected" if privacy is None else "is protected by the coordinator's noise"
        raise problems.PrivacyMismatch(f"{federation.name} {whose}, and the update says what it cost")
    if spent is None:
        text = f"{federation.name} is protected at level {privacy.level}, and the update does not say what it cost"
        raise problems.PrivacyMissing(f"{text}: install a version of promptfed that protects")
    training, given = federation.spec.training, [event.model_dump() for event in spent.events]
    planned = client.protection
    z = privacy.noise_multiplier or (planned.noise_multiplier if planned is not None else given[0]["z"])
    units = client.num_samples if client.units is None else client.units
    wanted = training_event(units, training.batch_size, training.epochs, z).as_json()
    if given != [wanted]:
        units_name = "samples" if privacy.unit == "record" else "groups"
        raise problems.PrivacyMismatch(f"the update was trained with {given}; {units} {units_name} give {wanted}")
    seeded = float(spent.noise == "seeded")
    told = {"privacy_epsilon": spent.epsilon, "privacy_delta": spent.delta, "privacy_z": z, "privacy_seeded": seeded}
    if spent.epsilon_replace_one is not None:
        told["privacy_replace_one"] = spent.epsilon_replace_one
    return told | {"privacy_q": wanted["q"], "privacy_count": wanted["count"]}
