"""Answers for everyone, without a token: methods, the signing key and the certificate."""

from __future__ import annotations

from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import Path, Response
from fastapi.responses import PlainTextResponse

from promptfed.coordinator.http import openapi
from promptfed.coordinator.http.certificates import authority
from promptfed.coordinator.http.deps import SettingsOf, SignerOf
from promptfed.coordinator.http.openapi import documented
from promptfed.coordinator.problems import NotFound
from promptfed.shared import methods
from promptfed.shared.api.api_schemas import MethodList, MethodView, SigningKey
from promptfed.shared.spec.spec import SpecError

router = openapi.router()
_DESCRIBED: dict[tuple[object, ...], bytes] = {}


@router.get("/v1/methods", response_model=MethodList, responses=documented(), tags=["methods"])
async def list_methods() -> Response:
    """All methods of this coordinator."""
    every = tuple(methods.METHODS[name] for name in sorted(methods.METHODS))
    if every not in _DESCRIBED:  # a thread is not kept for what anybody may ask
        _DESCRIBED[every] = await run_sync(_described)
    return Response(_DESCRIBED[every], media_type="application/json")


def _described() -> bytes:
    every = [MethodView.model_validate(methods.describe(name)) for name in sorted(methods.METHODS)]
    return MethodList(methods=every).model_dump_json().encode()


@router.get("/v1/methods/{name}", responses=documented(NotFound), tags=["methods"])
def get_method(name: Annotated[str, Path(max_length=100)]) -> MethodView:
    """One method by its name."""
    try:
        return MethodView.model_validate(methods.describe(name))
    except SpecError as error:
        raise NotFound(error.errors[0]["detail"]) from None


@router.get("/v1/signing-key", responses=documented(), tags=["results"])
async def get_signing_key(signer: SignerOf) -> SigningKey:
    """The public key that verifies this coordinator's signatures. Keep a copy from a coordinator that you trust."""
    return SigningKey(public_key=signer.public_key)


@router.get("/v1/authority", responses=documented(NotFound), response_class=PlainTextResponse, tags=["enrolment"])
def get_authority(settings: SettingsOf) -> str:
    """The last certificate of this coordinator's TLS chain, in PEM. Trust it only by its fingerprint."""
    certificate = authority(settings)
    if certificate is None:
        raise NotFound("this coordinator serves no TLS: there is no certificate")
    return certificate
