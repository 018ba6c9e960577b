"""``/v1/methods``, ``/v1/signing-key``, ``/v1/authority``: answers for everyone, without a token."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import PlainTextResponse

from promptfed.coordinator.api.deps import SettingsOf, SignerOf, documented
from promptfed.coordinator.http.callers import authority
from promptfed.coordinator.problems import NotFound
from promptfed.shared import methods
from promptfed.shared.api.api_schemas import MethodList, MethodView, SigningKey
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


@router.get("/authority", responses=documented(NotFound), response_class=PlainTextResponse, tags=["enrolment"])
def get_authority(settings: SettingsOf) -> str:
    """The last certificate of this coordinator's TLS chain, in PEM. Trust it only by its fingerprint."""
    certificate = authority(settings)
    if certificate is None:
        raise NotFound("this coordinator serves no TLS: there is no certificate")
    return certificate
