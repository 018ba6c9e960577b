"""``.../privacy`` and ``.../spends``: privacy costs."""

from __future__ import annotations

from fastapi import APIRouter

from promptfed.coordinator.api import deps
from promptfed.coordinator.api.deps import Calling, Informed, RegistryOf
from promptfed.coordinator.reports import privacy
from promptfed.shared.api.api_schemas import PrivacyView, SpendList

router = APIRouter(prefix="/v1/federations/{federation}", tags=["privacy"])


@router.get("/privacy", responses=deps.for_callers())
def get_privacy(registry: RegistryOf, federation: Informed) -> PrivacyView:
    """Spent and planned ε by client, as clients report it; refused tasks; the smallest secure sum; warnings."""
    with registry.database.read() as session:
        return privacy.privacy_view(session, federation)


@router.get("/spends", responses=deps.for_clients())
def get_spends(registry: RegistryOf, caller: Calling) -> SpendList:
    """The privacy cost that this client has reported. A ledger that lacks any of it is an old copy."""
    with registry.database.read() as session:
        return privacy.spends_of(session, caller.federation, caller.client)
