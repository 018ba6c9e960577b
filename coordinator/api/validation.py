"""``.../validation``: the signed report of a federation in which sites have validated an export."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from promptfed.coordinator import problems
from promptfed.coordinator.api import described
from promptfed.coordinator.api.deps import Informed, RegistryOf, SignerOf
from promptfed.coordinator.reports.validation import validation_report
from promptfed.shared.api.validation_report import SignedValidation, as_csv
from promptfed.shared.canonical import canonical_json
from promptfed.shared.signatures import validation_statement

router = APIRouter(prefix="/v1/federations/{federation}", tags=["results"])


@router.get(
    "/validation",
    response_model=SignedValidation,
    responses={
        200: {"content": {"text/csv": {}}, "description": "JSON or CSV"},
        **described.for_callers(problems.NoValidation),
    },
)
def get_validation(
    registry: RegistryOf,
    signer: SignerOf,
    federation: Informed,
    format: Annotated[Literal["json", "csv"], Query()] = "json",
) -> SignedValidation | Response:
    """What the sites have measured so far and the means over them, signed; as CSV without a signature."""
    with registry.database.read() as session:
        report = validation_report(session, federation)
    if format == "csv":
        return Response(as_csv(report), media_type="text/csv; charset=utf-8")
    said = validation_statement(canonical_json(report.model_dump(mode="json")))
    return SignedValidation(report=report, signature=signer.sign(said), public_key=signer.public_key)
