"""``.../privacy``, ``.../spends`` and ``.../receipts``: privacy costs, and signed receipts of payloads."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from promptfed.coordinator.api import described
from promptfed.coordinator.api.deps import NO_NUL, Calling, Informed, RegistryOf
from promptfed.coordinator.reports import privacy
from promptfed.shared.api.privacy_schemas import PrivacyView, SpendList
from promptfed.shared.messages import Witnesses

router = APIRouter(prefix="/v1/federations/{federation}", tags=["privacy"])


@router.get("/privacy", responses=described.for_callers())
def get_privacy(registry: RegistryOf, federation: Informed) -> PrivacyView:
    """Spent and planned ε by client, as clients report it; refused tasks; the smallest secure sum; warnings."""
    with registry.database.read() as session:
        return privacy.privacy_view(session, federation)


@router.get("/spends", responses=described.for_clients())
def get_spends(registry: RegistryOf, caller: Calling) -> SpendList:
    """The privacy cost that this client has reported. A ledger that lacks any of it is an old copy."""
    with registry.database.read() as session:
        return privacy.spends_of(session, caller.federation, caller.client)


@router.get("/receipts", responses=described.for_clients())
def get_receipts(
    registry: RegistryOf,
    caller: Calling,
    round: Annotated[int, Query(ge=0, le=100_000)] = 1,
    phase: Annotated[str, Query(max_length=100, pattern=NO_NUL)] = "train",
) -> Witnesses:
    """The payloads of the counted clients of a closed phase, as receipts that the clients have signed."""
    with registry.database.read() as session:
        return privacy.witnesses(session, caller.federation, round, phase)
