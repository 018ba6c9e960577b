"""``.../rounds/{round}/card``: what the coordinator knows of an export, and its signature."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request

from promptfed.coordinator import problems
from promptfed.coordinator.api import described
from promptfed.coordinator.api.deps import Operated, RegistryOf, SignerOf, Viewed
from promptfed.coordinator.engine import audit
from promptfed.coordinator.reports.export_checks import check_card
from promptfed.coordinator.reports.exports import known_of
from promptfed.shared.api.access_schemas import CardSignature
from promptfed.shared.api.export_card import Facts
from promptfed.shared.signatures import export_statement

router = APIRouter(prefix="/v1/federations/{federation}/rounds/{round}/card", tags=["results"])

Round = Annotated[int, Path(ge=0, le=1_000_000)]
CARD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "`card.json`, byte for byte as the export holds it",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


async def _body(request: Request, _: Operated) -> bytes:
    return await request.body()


@router.get("", responses=described.for_callers(problems.NoState))
def get_card(registry: RegistryOf, federation: Viewed, round: Round) -> Facts:
    """The facts of the card of an export: all but its classes, its files and how to use them."""
    return known_of(registry, federation, round).facts()


@router.post(
    "/signature",
    responses=described.for_callers(problems.NoState, problems.ExportDiffers, problems.StorageFull),
    openapi_extra=CARD_BODY,
)
def sign_card(
    registry: RegistryOf,
    signer: SignerOf,
    federation: Operated,
    round: Round,
    body: Annotated[bytes, Depends(_body)],
) -> CardSignature:
    """Sign the card of an export whose every fact is the coordinator's; the card names every other file's digest."""
    check_card(registry, federation, round, body)
    with registry.exclusively(), registry.database.write() as session:
        audit.note(session, "export-signed", federation, round=round, card_sha256=hashlib.sha256(body).hexdigest())
    return CardSignature(signature=signer.sign(export_statement(body)), public_key=signer.public_key)
