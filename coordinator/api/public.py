"""``/v1/methods`` and ``/v1/signing-key``: answers for everyone, without a token."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from promptfed.coordinator.api.deps import SignerOf
from promptfed.coordinator.api.described import documented
from promptfed.coordinator.problems import NotFound
from promptfed.shared import methods
from promptfed.shared.api.access_schemas import SigningKey
from promptfed.shared.api.api_schemas import MethodList, MethodView
from promptfed.shared.spec.spec import SpecError

router = APIRouter(prefix="/v1")


@router.get("/methods", responses=documented(), tags=["methods"])
def list_methods() -> MethodList:
    """All methods of this coordinator."""
    return MethodList(methods=[MethodView.model_validate(methods.describe(name)) for name in sorted(methods.METHODS)])


@router.get("/methods/{name}", responses=documented(NotFound), tags=["methods"])
def get_method(name: Annotated[str, Path(max_length=100)]) -> MethodView:
    """One method by its name."""
    try:
        return MethodView.model_validate(methods.describe(name))
    except SpecError as error:
        raise NotFound(error.errors[0]["detail"]) from None


@router.get("/signing-key", responses=documented(), tags=["results"])
async def get_signing_key(signer: SignerOf) -> SigningKey:
    """The public key that verifies this coordinator's signatures. Keep a copy from a coordinator that you trust."""
    return SigningKey(public_key=signer.public_key)
